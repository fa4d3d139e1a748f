"""A real AsyncEngine over the fake model: everything but the arithmetic is the real thing."""

from __future__ import annotations

from types import SimpleNamespace

from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_model import HIDDEN_SIZE, FakeExecutor, FakeRunner

from streamllm.config import EngineConfig
from streamllm.engine.async_engine import AsyncEngine
from streamllm.models.kv_layout import kv_layout
from streamllm.text.chat_template import ChatTemplate


def make_engine(
    *,
    num_blocks: int = 64,
    max_model_len: int = 256,
    max_num_seqs: int = 8,
    budget: int = 64,
    step_seconds: float = 0.0,
    windows: tuple[int | None, ...] = (None,),
    runner: type[FakeRunner] = FakeRunner,
    queue_depth: int = 1,
    **settings,
) -> AsyncEngine:
    """An engine over the fake model, checking its blocks in every step.

    Args:
        windows: of the model's layers.
        runner: the fake model.
        queue_depth: steps in flight at once.
        settings: further fields of the configuration.
    """
    tokenizer = ByteTokenizer()
    model = runner(block_size=16, max_num_batched_tokens=budget, windows=kv_layout(windows).windows)
    return AsyncEngine(
        config=EngineConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, debug_kv_blocks=True, **settings
        ),
        model_name="fake-model",
        model_config=SimpleNamespace(
            eos_token_ids=(),
            vocab_size=257,
            hidden_size=HIDDEN_SIZE,
            kv_layout=kv_layout(windows),
            ropes=(),
        ),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer.chat_template, {}),
        executor=FakeExecutor(model, step_seconds, queue_depth),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        default_sampling={},
    )
