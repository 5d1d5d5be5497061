"""The real Prometheus, on a free port of loopback, for the time of a test."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

from dashboard import ALERTS


class Prometheus:
    """A server with the project's rules. `config` is more of its configuration, and `directory` has its data."""

    def __init__(self, directory, config):
        self.directory = directory
        (directory / "prometheus.yml").write_text(f"rule_files: ['{ALERTS}']\n{config}")

    def __enter__(self):
        for _ in range(5):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            with open(self.directory / "log", "w") as log:
                self.process = subprocess.Popen(
                    ["prometheus", f"--config.file={self.directory}/prometheus.yml", f"--storage.tsdb.path={self.directory}/data", "--storage.tsdb.retention.time=100y",
                     f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"], stdout=log, stderr=log)
            started = time.monotonic()
            while self.process.poll() is None and time.monotonic() < started + 60:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready")
                    return self
                except OSError:
                    time.sleep(0.05)
            self.__exit__()
        raise SystemExit(f"prometheus does not start: {(self.directory / 'log').read_text()}")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def get(self, path, **parameters):
        data = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{data}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
