"""Which LoRA adapter a request is answered with (``vllm.lora.request.LoRARequest``)."""

from __future__ import annotations

from dataclasses import dataclass

from streamllm.checks import show_value
from streamllm.errors import InvalidRequestError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, by name and folder. Its files are read when a request first asks for it.

    Attributes:
        lora_name: what it is called.
        lora_int_id: vLLM's number of it, at least 1; nothing depends on it here.
        lora_path: folder of a PEFT checkpoint; may be left out if the engine serves an adapter of this name.
        base_model_name: the model that it was made for; for the user's own information.
        load_inplace: read the files anew even if they are in memory.

    Raises:
        InvalidRequestError: a field has the wrong type, or is out of its range.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidRequestError(
                f"lora_name must be a non-empty string, got {show_value(self.lora_name)}.", param="lora_name"
            )
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidRequestError(
                f"lora_int_id must be an integer of at least 1, got {show_value(number)}.",
                param="lora_int_id",
            )
        # A pathlib.Path is as good as its text.
        object.__setattr__(self, "lora_path", str(self.lora_path))

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path
