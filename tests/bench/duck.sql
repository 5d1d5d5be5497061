-- The DuckDB peer: the sums behind the exporter's metrics. Expects the variable `queue` to be set.
--
-- It is spared what the exporter also does: telling malformed lines apart, times in other forms than numbers, exact
-- decimals, oversized payloads and references to blobs. Chosen as the fastest of several: only the columns needed,
-- spend as a typed list rather than JSON, no order kept, one scan for both results. The default maximum_object_size,
-- 16 MiB, holds every line and costs nothing. The command line client starts faster than Python's module.
SET preserve_insertion_order = false;

CREATE TEMP TABLE record AS
SELECT "to", kind, status, ts, started_ts - ts AS wait, finished_ts - started_ts AS time, len(nacks) AS nacks, spend
FROM read_ndjson(getvariable('queue'), columns = {
    'to': 'VARCHAR', 'kind': 'VARCHAR', 'status': 'VARCHAR', 'ts': 'DOUBLE', 'started_ts': 'DOUBLE', 'finished_ts': 'DOUBLE',
    'nacks': 'STRUCT(ts DOUBLE)[]',
    'spend': 'STRUCT(model VARCHAR, cost_usd DOUBLE, input_tokens BIGINT, output_tokens BIGINT, cache_read_input_tokens BIGINT, cache_creation_input_tokens BIGINT)[]'
});

SELECT
    "to", kind, status,
    count(*) AS records,
    min(ts) AS oldest,
    sum(coalesce(nacks, (status = 'nack')::INT)) AS nacks,
    sum(list_sum(list_transform(spend, lambda entry: entry.cost_usd))) AS spend_usd,
    count(*) FILTER (len(list_filter(spend, lambda entry: entry.cost_usd IS NULL)) > 0) AS unpriced,
    sum(wait) AS wait_sum, histogram(wait, [10, 30, 60, 300, 900, 1800, 3600, 14400, 43200, 86400, 259200, 604800]) AS wait,
    sum(time) AS time_sum, histogram(time, [10, 30, 60, 300, 900, 1800, 3600, 14400, 43200, 86400, 259200, 604800]) AS time
FROM record
GROUP BY ALL;

SELECT
    kind, entry.model,
    sum(entry.input_tokens), sum(entry.output_tokens), sum(entry.cache_read_input_tokens), sum(entry.cache_creation_input_tokens)
FROM (SELECT kind, unnest(spend) AS entry FROM record)
GROUP BY ALL;
