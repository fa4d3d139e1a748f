"""The registry of logits processors: names, plug-ins, refusals."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from streamllm import logits_processors
from streamllm.errors import InvalidRequestError
from streamllm.logits_processors import make_logits_processors, register_logits_processor


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(logits_processors, "_registered", {})


def constant(extra_args, vocab_size):
    return lambda prompt, output, logits: np.full(vocab_size, extra_args["value"], np.float32)


def test_processors_are_made_in_order_for_each_request():
    register_logits_processor("constant", constant)
    register_logits_processor("same", lambda extra_args, vocab_size: lambda prompt, output, logits: logits)
    first, second = make_logits_processors(["constant", "same"], {"value": 2.0}, 5)
    logits = np.zeros(5, np.float32)
    assert first((), (), logits).tolist() == [2.0] * 5 and second((), (), logits) is logits
    assert make_logits_processors(["constant"], {"value": 2.0}, 5)[0] is not first


def test_a_name_belongs_to_one_factory():
    register_logits_processor("constant", constant)
    register_logits_processor("constant", constant)
    with pytest.raises(ValueError, match="registered already"):
        register_logits_processor("constant", lambda extra_args, vocab_size: None)
    with pytest.raises(ValueError, match="needs a name"):
        register_logits_processor("", constant)


def test_unknown_names_and_refusals_name_what_is_wrong():
    with pytest.raises(InvalidRequestError, match=r'"os\.system", which is not registered; registered: none'):
        make_logits_processors(["os.system"], None, 5)
    register_logits_processor("b", constant)
    register_logits_processor("a", constant)
    with pytest.raises(InvalidRequestError, match="registered: a, b") as caught:
        make_logits_processors(["a" * 1000], {}, 5)
    assert caught.value.param == "logits_processors" and len(str(caught.value)) < 200

    def picky(extra_args, vocab_size):
        raise ValueError("vllm_xargs must hold value")

    register_logits_processor("picky", picky)
    with pytest.raises(InvalidRequestError, match='"picky" refuses the request: vllm_xargs must') as caught:
        make_logits_processors(["picky"], {}, 5)
    assert caught.value.param == "extra_args"


def test_installed_packages_offer_their_own(tmp_path, monkeypatch):
    """A real distribution on the path, with a plug-in that works and one that does not."""
    (tmp_path / "plugin_of_ours.py").write_text(
        "def make(extra_args, vocab_size):\n    return lambda prompt, output, logits: -logits\n"
    )
    info = tmp_path / "plugin_of_ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-ours\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[streamllm.logits_processors]\nnegate = plugin_of_ours:make\nbroken = plugin_of_ours:nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (negate,) = make_logits_processors(["negate"], None, 2)
    assert negate((), (), np.array([1.0, -2.0])).tolist() == [-1.0, 2.0]
    with pytest.raises(
        InvalidRequestError, match='plug-in of the logits processor "broken" cannot be loaded'
    ):
        make_logits_processors(["broken"], None, 2)
    with pytest.raises(InvalidRequestError, match="registered: broken, negate"):
        make_logits_processors(["other"], None, 2)
    sys.modules.pop("plugin_of_ours")
