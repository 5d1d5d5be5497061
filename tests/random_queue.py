#!/usr/bin/env python3
"""Prints a random queue: random_queue.py SEED [LINES]. The same seed gives the same bytes.

Sound records of every shape are mixed with odd values in every field, with damage and with ledger lines. Give it to
recount.py and to the exporter, or to retain.py and to handoff-compact, and compare, with `--now 2026-11-29T12:00:00Z` (some records lie
a little after it, many close to 14 days before it), with and without `--prices tests/data/cases/prices/prices.json`, which knows some of the models. In some 500 lines there are fewer
than 50 roles, kinds and models, so that the order of appearance does not matter, unless the seed is a multiple of 10.
"""

import random
import sys

NOW = 1795953600
LIMIT = 14 * 86_400  # what handoff-compact takes for old if not told otherwise
BIG = 8192


class Maker:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.many = seed % 10 == 0
        # Whether something gave doubt that FORMAT.md leaves to the reader; such lines get no big payload.
        self.plain = True

    def chance(self, p):
        return self.rng.random() < p

    def pick(self, *options):
        return self.rng.choice(options)

    # -------------------------------------------------------------------------------------------------------- JSON text

    def string(self, text):
        """A string literal, with escapes where none are needed now and then."""
        out = []
        for c in text:
            if c in '"\\':
                out.append("\\" + c)
            elif c < " " or self.chance(0.03):
                if c in "\b\f\n\r\t" and self.chance(0.5):
                    out.append({"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}[c])
                elif c == "/" and self.chance(0.5):
                    out.append("\\/")
                else:
                    units = c.encode("utf-16-be")
                    case = self.pick("{:04x}", "{:04X}")
                    out += ["\\u" + case.format(units[i] * 256 + units[i + 1]) for i in range(0, len(units), 2)]
            else:
                out.append(c)
        return '"' + "".join(out) + '"'

    def space(self):
        return self.pick("", "", "", "", "", "", " ", "\t", " \r ") if self.chance(0.3) else ""

    def object(self, members):
        s = self.space
        return "{" + s() + ",".join(f"{s()}{k}{s()}:{s()}{v}{s()}" for k, v in members) + "}"

    def array(self, items):
        return "[" + self.space() + ",".join(self.space() + i + self.space() for i in items) + "]"

    def text(self):
        return "".join(self.pick("a", "b", " ", "\u00e9", "\u2028", "\U0001f600", "\n", "\t", "\x7f", "\\", '"', "/", "\u0000", "\ufeff", "x", "{", "}", "\\ud83d", "\u05d0") for _ in range(self.rng.randrange(12)))

    def number(self):
        return self.pick("0", "-0", "1", "-1", "0.1", "0.1000", "-0.0", "1e-7", "1E+3", "1e400", "-1e400", "1E-400", "123456789012345678901234567890", "3.0", "0e5", "9" * 300, "0." + "3" * 60,
                         "2.5e-1", "18446744073709551615", "18446744073709551616", "9007199254740993", "1e999999999999999999999", "4294967296", "100e-2", "0.00", "1e22", "5e-324",
                         str(self.rng.randrange(10**6)), repr(self.rng.random()), repr(self.rng.uniform(0, 1e5)))

    def junk(self, depth=0):
        """Any value that casts no doubt by itself."""
        r = self.rng.randrange(9 if depth < 4 else 6)
        if r < 2:
            return self.number()
        if r < 4:
            return self.string(self.text())
        if r < 6:
            return self.pick("true", "false", "null")
        if r == 6:
            return self.array([self.junk(depth + 1) for _ in range(self.rng.randrange(4))])
        if r == 7:
            return self.object([(f'"{k}"', self.junk(depth + 1)) for k in self.rng.sample("abcdefg", self.rng.randrange(4))])
        n = self.rng.randrange(1, 300)
        return self.pick("[" * n + "]" * n, '{"a":' * n + "1" + "}" * n)

    def nonfinite(self):
        return self.pick("NaN", "Infinity", "-Infinity")

    def odd(self):
        """Any value at all, also one that casts doubt."""
        self.plain = False
        return self.nonfinite() if self.chance(0.2) else '"\\ud83d"' if self.chance(0.1) else self.junk()

    # ----------------------------------------------------------------------------------------------------------- fields

    def micros(self, us):
        """The same time in one of its forms."""
        seconds, fraction = divmod(us, 1_000_000)
        form = self.rng.randrange(8)
        if form < 3 and not fraction:
            return str(seconds)
        if form == 3 and not fraction:
            return self.pick(f"{seconds}.0", f"{seconds}.000", f"{seconds}e0", f"{seconds // 10}.{seconds % 10}E+1", f"{seconds}000", f"{seconds}000.0", f"{seconds}00e1")
        if form == 4:
            return f"{us // 1000}.{us % 1000:03}" if self.chance(0.5) else f"{us}e-3"
        if form > 5:
            offset = self.rng.randrange(-23 * 60, 23 * 60) if self.chance(0.5) else None
            days, rest = divmod(seconds + (offset or 0) * 60, 86_400)
            import datetime

            day = datetime.date.fromordinal(days + 719_163)
            dot = f".{fraction:06}".rstrip("0").rstrip(".") if not self.chance(0.3) else f".{fraction:06}" + self.pick("", "0", "000", "4", "49")
            zone = self.pick("Z", "z", "+00:00", "-00:00") if offset is None else f"{'+' if offset >= 0 else '-'}{abs(offset) // 60:02}:{abs(offset) % 60:02}"
            return self.string(f"{day.isoformat()}{self.pick('T', 'T', 't')}{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}{dot}{zone}")
        if form == 5:  # what Python's repr gives, which often has seven decimals
            return repr(us / 1e6 + self.rng.random() * 1e-6)
        return f"{seconds}.{fraction:06}" + self.pick("", "", "0", "2", "4", "4999", "5", "7")

    def bad_time(self):
        self.plain = False
        return self.pick("-1", "-0.5", "1e14", "1e400", '"1795950000"', '"2026-11-29"', '"2026-11-29T10:00:00"', '"2026-02-30T10:00:00Z"', '"2026-11-29T25:00:00Z"', '"2026-11-29T10:00:00+24:00"',
                         '"2026-11-29T10:00:00+1:00"', '""', "true", "[]", "{}", "NaN", "Infinity", '"now"', "123456789012345678901234567890", '"1969-12-31T23:59:59Z"', '"6000-01-01T00:00:00Z"')

    def any_time(self):
        if self.chance(0.05):
            return self.pick("0", "1", "-0", "-0.0", "99999999999", "99999999999.5", "1e11", "100000000000", "99999999999999", "1e-7", "1E+3", "0.1000", '"1970-01-01T00:00:00Z"', '"5137-12-31T23:59:59Z"')
        us = (NOW - int(self.rng.expovariate(1 / 40_000))) * 1_000_000 + (self.rng.randrange(10**6) if self.chance(0.4) else 0)
        return self.micros(us)

    def name(self, prefix):
        if self.chance(0.06):
            return self.string(self.pick("", "other", 'q"uote', "back\\slash", "line\nfeed", "car\rriage", "__name__", "x" * 128, "x" * 129, "\u00e9" * 64, "\u00e9" * 65, "\u0000", "\U0001f600", " ", "\u2028",
                                         "\x7f", "\x85", "ledger", "queued")) if not self.many else self.string(prefix)
        return self.string(prefix + str(self.rng.randrange(90 if self.many else 4)))

    def status(self):
        return self.string(self.pick("queued", "running", "done", "done", "done", "nack", "human", "dead", self.pick("paused", "", "DONE", "ledger", " done")))

    def count(self):
        if self.chance(0.08):
            return self.pick("-1", "1.5", '"5"', "true", "[]", "1e3", "NaN", "18446744073709551616", "12.0")
        return self.pick("null", "0", str(self.rng.randrange(20)), str(self.rng.randrange(5000)), str(self.rng.randrange(5000)), str(self.rng.randrange(400_000)), str(self.rng.randrange(2**50)) if self.chance(0.1) else "7")

    def cost(self):
        if self.chance(0.25):
            return self.pick("NaN", "-0.01", "-1", "1e400", "1000000000.01", "1000000000", "1e9", '"abc"', '" 1"', '"1 "', '"+1"', '".5"', '"01"', '""', '"NaN"', "true", "[]", "{}", "0." + "1" * 29, "0." + "1" * 28,
                             "1e-28", "1e-29", "0.5" + "0" * 50, '"0.25"', '"1e-3"', '"0"', "0", "0.0", "0e9", "-0", "-0.0", "null", "123456789.123456789012345678", '"1E+3"', '"\\u0031"', "5e-324")
        return self.pick("0", f"{self.rng.randrange(1, 10**6) / 10**6!r}", f"0.{self.rng.randrange(10**6):06}", f'"0.{self.rng.randrange(10**6):06}"', f"{self.rng.randrange(1, 10**4)}e-5", f"{self.rng.random()!r}")

    def entry(self):
        if self.chance(0.06):
            return self.pick("null", "true", '"0.5"', "[]", "[0.5]", '"x"') if self.chance(0.5) else self.cost_number()
        m = []
        if self.chance(0.4):
            m.append(('"id"', self.pick('"m1"', '"m2"', '"\\u006d1"', '"m3"', "7", "null")))
        if self.chance(0.85):
            m.append(('"model"', self.pick('"m-paid"', '"m-free"', '"m-tier"', '"m-half"', '"m-unknown"', self.name("model"), self.name("model"), "null", "7", '""')))
        if self.chance(0.3):
            m.append(('"provider"', self.pick('"vendor"', '"elsewhere"', "null", "3")))
        if self.chance(0.7):
            m.append(('"cost_usd"', self.cost()))
        form = self.rng.randrange(5)
        if form == 0:
            names = ["input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"]
            m += [(f'"{n}"', self.count()) for n in names if self.chance(0.8)]
        elif form == 1:  # whole and parts, mostly sound
            whole = self.rng.randrange(10_000)
            m += [('"prompt_tokens"', str(whole)), ('"completion_tokens"', self.count())]
            if self.chance(0.6):
                m.append(('"prompt_tokens_details"', self.pick("null", "{}", '{"cached_tokens":null}', '{"cached_tokens":%d,"audio_tokens":0}' % self.rng.randrange(whole + 1), '{"cached_tokens":%d}' % (whole + self.rng.randrange(3)))))
            elif self.chance(0.5):
                m += [('"cache_read_input_tokens"', str(self.rng.randrange(whole + 1))), ('"cache_creation_input_tokens"', str(self.rng.randrange(whole + 1) // 2))]
        elif form == 2:
            whole = self.rng.randrange(300_000)
            m += [('"input_tokens"', str(whole)), ('"output_tokens"', self.count()), ('"input_tokens_details"', '{"cached_tokens":%d}' % self.rng.randrange(whole + 2))]
        elif form == 3:
            m += [('"input_tokens"', "10"), ('"prompt_tokens"', "4000"), ('"output_tokens"', self.pick("null", "3")), ('"completion_tokens"', "500")]
        if self.chance(0.1):
            m.append(('"total_tokens"', self.junk()))
        if self.chance(0.03) and m:
            self.plain = False
            m.append(self.rng.choice(m))
        self.rng.shuffle(m)
        return self.object(m)

    def cost_number(self):
        return self.pick("0", "0.25", "1e-7", "1E+3", "0.1000", "-0.5", "1e400", "NaN", "-0.0", "Infinity", f"{self.rng.random()!r}")

    def spend(self):
        r = self.rng.random()
        self.plain = False
        if r < 0.15:
            return self.cost_number()
        if r < 0.5:
            return self.entry()
        if r < 0.92:
            return self.array([self.entry() for _ in range(self.rng.randrange(5))])
        return self.pick("null", '"0.5"', "true", "false", "{}", "[]", "[[]]", "[{}]", "[null]")

    def nacks(self):
        self.plain = False
        if self.chance(0.6):
            return self.array([self.pick('{"ts":1795950000,"by":"r1","reason":"x","error_class":"timeout","retryable":true}', "{}", "1", "null") for _ in range(self.rng.randrange(4))])
        return self.pick("0", "1", "2", "7", "null", "-1", "1.5", '"1"', "true", "{}", "4294967295", "4294967296", "NaN", "1e400")

    def payload(self):
        if self.chance(0.04):
            return self.pick("null", "[]", '"text"', "7", "true")
        m = [(self.string(self.pick("summary", "a", "b", "c\n", "")), self.junk()) for _ in range(self.rng.randrange(4))]
        if self.chance(0.15):
            m.append((self.pick('"\\ud83d"', '"s"'), self.pick('"\\udc00x"', '"\\ud83d\\ude00"', '"\\ud83d\\u0041"')))
        if self.chance(0.06):
            aa, rest = f"{self.rng.randrange(256):02x}", f"{self.rng.getrandbits(248):062x}"
            good = f"blob/{aa}/{aa}{rest}"
            m.append(('"ref"', f'"{self.pick(good, good, good + " " + good, good + "0", good[:-1], good.upper(), "blob/zz/" + aa + rest, good + "Z")}"'))
        if self.plain and self.chance(0.15):
            n = BIG + self.rng.randrange(-3, 4)
            m.append((f'"big{self.rng.randrange(3)}"', self.pick('"' + "x" * (n - 2) + '"', "[" + " " * (n - 2) + "]", "1" * n, '"' + "\u00e9" * ((n - 2) // 2) + '"')))
        if self.chance(0.05) and m and not any(k.startswith('"big') for k, _ in m):
            m.append((m[0][0], "2"))
        return self.object(m)

    # ------------------------------------------------------------------------------------------------------------ lines

    def moment(self):
        """A time that a decision about keeping a record may hang on."""
        exact = self.pick(0, 0, 0, 1, -1, self.rng.randrange(-(10**6), 10**6))
        limit, now = (NOW - LIMIT) * 1_000_000, NOW * 1_000_000
        r = self.rng.random()
        if r < 0.35:  # old, a day or a year
            return limit - self.rng.randrange(self.pick(86_400, 31_536_000) * 1_000_000)
        if r < 0.65:
            return limit + exact
        if r < 0.8:
            return limit + self.rng.randrange(LIMIT * 1_000_000)
        return now + self.pick(exact, exact, 86_400_000_000) if r < 0.93 else 0

    def moment_text(self, us):
        return self.micros(us) if us > 0 else self.pick("0", "-0", "0.0", "0.0000004", "0e9", '"1970-01-01T00:00:00Z"', '"1970-01-01T01:00:00+01:00"')

    def aged(self, m):
        """Makes a record one that compaction might remove, or only just not."""
        fields = dict(m)
        if self.chance(0.85):
            fields['"status"'] = self.string("done")
        times = [self.moment() for _ in range(3)]
        if self.chance(0.6):  # in their order, close together
            times = sorted(max(0, times[2] - self.pick(0, 0, 1, self.rng.randrange(10**10))) for _ in range(3))
        for name, us in zip(('"ts"', '"started_ts"', '"finished_ts"'), times):
            if name == '"ts"' or self.chance(0.75):
                fields[name] = self.moment_text(us)
            elif self.chance(0.2):
                fields[name] = self.pick("null", "null", self.bad_time())
        if self.chance(0.3):
            fields['"nacks"'] = self.pick("[]", "0", "-0", "null", "1", "[{}]", "[null]", self.nacks())
        m = list(fields.items())
        if self.chance(0.05):  # of these the last one counts, and whichever it is, they cast doubt
            key = self.pick('"status"', '"ts"', '"finished_ts"', '"started_ts"', '"nacks"', '"to"')
            m.insert(self.rng.randrange(len(m) + 1), (key, fields.get(key, "null") if self.chance(0.5) else self.pick('"done"', '"queued"', "null", "0", "1", "[]")))
            self.plain = False
        return m

    def record(self):
        self.plain = True
        m = [('"id"', self.string(f"id-{self.rng.randrange(10**9)}")), ('"ts"', self.any_time()), ('"kind"', self.name("kind")), ('"from"', self.name("role")), ('"to"', self.name("role")),
             ('"status"', self.status())]
        if self.chance(0.4):
            m.append(('"protocol_version"', self.pick("1", "2", "2", "2", "null", self.pick("3", "0", '"2"', "true", "-1", "{}", "1.5", "12345678901234567890123"))))
        base = (NOW - int(self.rng.expovariate(1 / 40_000))) * 1_000_000 + self.rng.randrange(10**6)
        if self.chance(0.6):
            # Close to the bounds: small gaps, gaps of just a bound, gaps below 0 and below -1 s.
            gap = self.pick(0, 10, 30, 60, 300, 900, 1800, 3600, 14_400, 604_800, self.rng.randrange(20_000)) * 1_000_000 + self.pick(0, 0, 1, -1, self.rng.randrange(10**6), -999_999, -1_000_000, -1_000_001)
            m[1] = ('"ts"', self.micros(base - gap))
            m.append(('"started_ts"', self.micros(base)))
            if self.chance(0.7):
                gap = self.pick(0, 10, 60, 600, self.rng.randrange(3000)) * 1_000_000 + self.pick(0, 1, -1, self.rng.randrange(10**6), -999_999, -1_000_000)
                m.append(('"finished_ts"', self.micros(base + gap)))
        elif self.chance(0.3):
            m.append((self.pick('"started_ts"', '"finished_ts"'), self.pick("null", self.bad_time(), self.any_time())))
        if self.chance(0.3):
            m.append(('"nacks"', self.nacks()))
        if self.chance(0.3):
            m = self.aged(m)
        if self.chance(0.6):
            m.append(('"spend"', self.spend()))
        if self.chance(0.2):
            m.append((self.pick('"x"', '"Status"', '"run_id"', '"owner"', '"result"', '"ledger"', '"totals"'), self.junk()))
        if self.chance(0.12):  # something odd in any field
            at = self.rng.randrange(len(m))
            m[at] = (m[at][0], self.odd())
        if self.chance(0.03):
            del m[self.rng.randrange(len(m))]
        if self.chance(0.04):  # a duplicate, the last of which counts
            key, value = self.rng.choice(m)
            m.append((key, self.pick(value, self.odd())))
            self.plain = False
        if self.chance(0.03):
            m.append(('"when"', self.nonfinite()))
            self.plain = False
        m.insert(self.rng.randrange(len(m) + 1), ('"payload"', self.payload()))
        if self.chance(0.3) and len({k for k, _ in m}) == len(m):
            self.rng.shuffle(m)
        if self.chance(0.03):
            m = [(self.string(k[1:-1]) if self.chance(0.3) else k, v) for k, v in m]
        return self.object(m).encode("utf-8")

    def ledger(self):
        def histogram():
            return '{"buckets":[%s],"sum_us":%d}' % (",".join(str(self.rng.randrange(5)) for _ in range(13)), self.rng.randrange(10**12))

        cells = []
        for _ in range(self.rng.randrange(4)):
            m = [('"role"', self.name("role")), ('"kind"', self.name("kind"))]
            m += [(f'"{n}"', str(self.rng.randrange(100))) for n in ("records", "done", "dead", "nacks", "unpriced") if self.chance(0.8)]
            m += [(f'"{n}"', histogram()) for n in ("queue_wait", "role_time") if self.chance(0.8)]
            if self.chance(0.8):
                m.append(('"spend_usd"', f'"{self.pick("0", "0.0375", "12.5", "0.1", "1e-3", "999.123456789012")}"'))
            cells.append(self.object(m))
        tokens = [self.object([('"kind"', self.name("kind")), ('"model"', self.name("model"))] + [(f'"{n}"', str(self.rng.randrange(10**6))) for n in ("input", "output", "cache_read", "cache_creation") if self.chance(0.8)])
                  for _ in range(self.rng.randrange(3))]
        members = [('"cells"', self.array(cells)), ('"tokens"', self.array(tokens)), ('"reclaimed_bytes"', str(self.rng.randrange(10**6)))]
        if self.chance(0.7):
            names = lambda prefix: self.array([self.name(prefix) for _ in range(self.rng.randrange(60 if self.many else 6))])
            members = [(f'"{prefix}s"', names(prefix)) for prefix in ("role", "kind", "model") if self.chance(0.8)] + members
            if self.chance(0.05):
                members.append((self.pick('"roles"', '"kinds"', '"models"'), self.pick("[]", "null", "{}", '"r"', "7", "[7]", "[null]", '[["r"]]')))
        if self.chance(0.2):  # labels come first wherever their names stand
            self.rng.shuffle(members)
        totals = self.object(members)
        version = "1"
        if self.chance(0.15):
            version = self.pick("2", "0", '"1"', "null", "true")
        elif self.chance(0.15):
            totals = self.pick("[]", '{"cells":7}', '{"cells":[{}]}', '{"cells":[{"role":"r","kind":"k","records":-1}]}', '{"cells":[{"role":"r","kind":"k","spend_usd":1}]}', '{"tokens":[{"kind":"k"}]}',
                               '{"roles":["r"],"roles":["r"]}', '{"kinds":"k"}', '{"models":[1]}', '{"models":null}', '{"cells":[{"role":"r","kind":"k","done":1,"done":1}]}',
                               '{"cells":[{"role":"r","kind":"k","queue_wait":{"buckets":[1],"sum_us":1}}]}')
        return ('{"id":"ledger","ts":1795900000,"kind":"ledger","from":"handoff","to":"","payload":{"version":%s,"totals":%s,"generations":{%s}},"status":"ledger"}'
                % (version, totals, self.pick("", '"7":48231', '"7":1,"12":0'))).encode("utf-8")

    def damage(self, line):
        r = self.rng.randrange(12)
        at = self.rng.randrange(1, len(line))
        if r == 0:
            return line[:at]
        if r == 1:
            return line + self.record()
        if r == 2:
            return b"\0" * self.rng.randrange(1, 600)
        if r == 3:
            return line[:at] + self.pick(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82") + line[at:]
        if r == 4:
            return line[:at] + self.pick(b",", b"}", b'"', b"\\", b"\0", b"0", b"\x1f", b"\xe2\x80\xa8", b"]", b"-", b"e") + line[at:]
        if r == 5:
            return line[:at] + line[at + 1 :]
        if r == 6:
            return self.junk().encode("utf-8")
        if r == 7:
            return b"\xef\xbb\xbf\xef\xbb\xbf" + line
        if r == 8:
            return b"[" * self.rng.randrange(1, 5000)
        if r == 9:
            return line[at:]
        if r == 10:
            return self.pick(b"nul", b"NaN", b"-NaN", b"nan", b"{NaN:1}", b"'a'", b"{,}", b"[1,]", b"01", b"\xef\xbb", b'{"a":1}//', b'"', b"-", b"\x0c", b"\xc2\xa0")
        return line + self.pick(b"\0", b"\xef\xbb\xbf", b" x", b",", b"\x0b")

    def line(self):
        r = self.rng.random()
        if r < 0.06:
            return self.damage(self.record())
        if r < 0.09:
            return self.pick(b"", b" ", b"\r", b"\t \r")
        if r < 0.11:
            return self.ledger()
        line = self.record()
        if self.chance(0.04):
            line = b"\xef\xbb\xbf" + line
        if self.chance(0.08):
            line += self.pick(b"\r", b" ", b" \t\r")
        return line


def main():
    seed, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300
    maker = Maker(seed)
    out = b"".join(maker.line() + b"\n" for _ in range(count))
    if maker.chance(0.5):
        out += maker.record()[: maker.rng.randrange(1, 200)]
    sys.stdout.buffer.write(out)


if __name__ == "__main__":
    main()
