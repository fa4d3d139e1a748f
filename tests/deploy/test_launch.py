"""``streamllm serve --replicas`` up to where Ray starts, and what it says without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamllm.config import EngineConfig, ServerConfig
from streamllm.deploy import launch, ray_serve
from streamllm.errors import ConfigError
from streamllm.replica_settings import ReplicaConfig


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_replicas": 3}, "--max-replicas goes with --replicas"),
        ({"ray_address": "auto"}, "--ray-address goes with --replicas"),
        ({"replicas": 0}, "--replicas must be between 1 and"),
        ({"replicas": 4, "max_replicas": 2}, r"--max-replicas must be at least --replicas \(4\), got 2"),
    ],
)
def test_settings_that_do_not_fit(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReplicaConfig(**settings)


def test_only_a_range_scales() -> None:
    assert not ReplicaConfig(replicas=2).is_autoscaled
    assert not ReplicaConfig(replicas=2, max_replicas=2).is_autoscaled
    assert ReplicaConfig(replicas=2, max_replicas=4).is_autoscaled
    assert ReplicaConfig(replicas=2, max_replicas=4).most_replicas == 4


@pytest.mark.usefixtures("no_ray")
def test_without_ray_one_line_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"--replicas needs the extra ray: pip install 'streamllm\[ray\]'"):
        ray_serve.import_serve()


def test_the_command_line_says_so_too() -> None:
    code = "import sys; sys.modules['ray'] = None; from streamllm.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--replicas", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "streamllm: error: --replicas needs the extra ray: pip install 'streamllm[ray]'."
    ]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"uds": "/tmp/x.sock"}, "--uds does not go with"),
        ({"ssl_certfile": "x", "ssl_ca_certs": "x", "ssl_cert_reqs": 2}, "--ssl-cert-reqs does not go"),
    ],
)
def test_what_serve_cannot_do_is_refused(server: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launch.serve_replicas({}, ServerConfig(**server), ReplicaConfig(replicas=2))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replica": 2}, "there is no replica"),
        ({"engine": {"modle": "x"}}, "there is no engine.modle"),
        ({"server": {"keys": []}}, "there is no server.keys"),
        ({"ray_address": "auto"}, "ray_address does not go into"),
        ({"replicas": 0}, "--replicas must be between"),
    ],
)
def test_a_serve_config_with_mistakes(args: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ray_serve.app(args)


def test_nodes_must_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    config = EngineConfig(model=str(tmp_path))
    here = ray_serve.Origin("0.0", None)
    with pytest.raises(ConfigError, match=r"the node 10\.0\.0\.1 has streamllm .*, and this is 0\.0"):
        here.check("10.0.0.1", config)
    import streamllm
    from streamllm.runner.distributed.fingerprint import fingerprint
    from streamllm.sources.resolve import resolve

    origin = ray_serve.Origin(streamllm.__version__, fingerprint(resolve(str(tmp_path))))
    origin.check("10.0.0.1", config)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 has another model: model\.safetensors has 5 bytes"):
        origin.check("10.0.0.1", config)


def test_what_the_user_has_set_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in launch.proxy_environment(ServerConfig(), tmp_path)


def test_signals_are_taken_once() -> None:
    stop = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    with launch._signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_proxy_left_behind_is_ended(tmp_path: Path) -> None:
    with launch._proxy_folder() as folder:
        code = "import time; print('runs', flush=True); time.sleep(60)"
        command = [sys.executable, "-c", code, f"{folder}/haproxy.cfg"]
        left = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert left.stdout is not None and left.stdout.readline() == b"runs\n"
    assert left.wait(10) == -signal.SIGTERM
    assert not folder.exists()


def test_the_line_that_says_why() -> None:
    report = (
        "Deploying app 'streamllm' failed with exception:\nTraceback (most recent call last):\n"
        "  File ...\nstreamllm.errors.ModelLoadError: The model x does not exist.\n\nthe replica ended"
    )
    assert launch._cause(report) == "The model x does not exist."
    assert launch._cause("one line") == "one line"
