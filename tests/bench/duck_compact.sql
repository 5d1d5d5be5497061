-- The DuckDB peer of compaction: writes the lines that stay, as they are and in their order. Expects the variables `queue`, `before` (seconds
-- since the epoch) and `out` to be set.
--
-- It is spared what handoff-compact also does: doubtful and malformed lines, times in other forms than numbers, totals for the
-- ledger. Chosen as the fastest of several: the JSON reader finds the lines on both threads, where the CSV reader took them on
-- one, and one extraction of a list of paths parses each line once more, where an expression for each path, or a struct, took longer.
COPY (
    SELECT json
    FROM (
        SELECT json, json_extract_string(json, ['$.status', '$.ts', '$.finished_ts', '$.nacks[0]']) AS field
        FROM read_ndjson_objects(getvariable('queue'))
    )
    WHERE NOT (field[1] = 'done' AND field[4] IS NULL AND coalesce(field[3], field[2])::DOUBLE < getvariable('before'))
) TO (getvariable('out')) (FORMAT csv, HEADER false, DELIMITER '\x01', QUOTE '', ESCAPE '');
