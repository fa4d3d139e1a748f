"""How a model's matrices can be divided among ranks, read off its forward (Megatron-LM, Shoeybi et al. 2019,
arXiv:1909.08053).

Where two products follow one another with nothing between them that mixes columns, the first is cut by rows
and the second by columns alike: each rank then computes both on its own, and a sum over the ranks gives the
result. Attention mixes no heads, and neither activations nor gates mix columns. The embedding and the logits'
matrix are cut by tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from streamllm.models.forward_trace import ForwardTrace, TracedCall, TracedExperts, TracedMatrix
from streamllm.ops import Attention

_ELEMENTWISE = ("activate", "scale", "soft_cap")


class NotDivisible(Exception):
    """Why a model's forward cannot be divided: the rest of a sentence."""


@dataclass(frozen=True)
class AttentionSplit:
    """The products around one attention.

    Attributes:
        qkv: its rows are ``[q heads | k heads | v heads]``.
        out: its columns are the query heads.
    """

    qkv: TracedMatrix
    attention: Attention
    out: TracedMatrix


@dataclass(frozen=True)
class InnerSplit:
    """The products around an activation, of one MLP or of a layer's experts.

    Attributes:
        first: its rows are the inner width, once or (with gates) twice.
        second: its columns are the inner width.
    """

    first: TracedMatrix | TracedExperts
    second: TracedMatrix | TracedExperts

    @property
    def width(self) -> int:
        return self.second.columns


@dataclass
class Splits:
    """What is divided; all other weights every rank has whole.

    Attributes:
        vocabulary: the matrices of the embedding and of the logits, which may be one.
    """

    attentions: list[AttentionSplit] = field(default_factory=list)
    inners: list[InnerSplit] = field(default_factory=list)
    vocabulary: list[TracedMatrix] = field(default_factory=list)


def find_splits(trace: ForwardTrace) -> Splits:
    """
    Raises:
        NotDivisible: the forward does with columns that would lie on several ranks what needs them together.
    """
    splits = Splits()
    uses = Counter(buffer.maker for call in trace.calls for buffer in call.inputs)
    divided: dict[TracedCall | None, _Divided] = {}
    for call in trace.calls:
        makers = [buffer.maker for buffer in call.inputs]
        source = divided.get(makers[0]) if makers else None
        if source is not None and call.operation in (*_ELEMENTWISE, "paged_attention"):
            divided[call] = source
        elif source is not None and call.operation == "linear" and uses[makers[0]] == 1:
            if source.attention is None:
                splits.inners.append(InnerSplit(source.first, _matrix(call)))
            else:
                splits.attentions.append(AttentionSplit(source.first, source.attention, _matrix(call)))
        elif any(maker in divided for maker in makers):
            raise NotDivisible(f"its operation {call.operation} reads columns that lie on several ranks")
        elif call.operation == "rotary_and_cache":
            _check_norms(call)
            divided[call] = _Divided(_producer(makers[0], uses), call.attention)
        elif call.operation in ("gate_and_mul", "activate"):
            divided[call] = _Divided(_producer(makers[0], uses))
        elif call.operation == "experts":
            gate_up, down = (weight for weight in call.weights if isinstance(weight, TracedExperts))
            splits.inners.append(InnerSplit(gate_up, down))
        elif call.operation == "embedding":
            splits.vocabulary.append(_matrix(call))
    splits.vocabulary.append(_logits_matrix(trace))
    return splits


@dataclass(frozen=True)
class _Divided:
    """The product whose columns each rank has some of."""

    first: TracedMatrix
    attention: Attention | None = None


def _matrix(call: TracedCall) -> TracedMatrix:
    (matrix,) = call.weights
    assert isinstance(matrix, TracedMatrix)
    return matrix


def _producer(maker: TracedCall | None, uses: Counter[TracedCall | None]) -> TracedMatrix:
    """The matrix whose product ``maker`` is, which nobody else reads."""
    if maker is None or maker.operation != "linear" or uses[maker] != 1:
        raise NotDivisible("what its attention or its MLP takes is no product of its own")
    return _matrix(maker)


def _check_norms(call: TracedCall) -> None:
    attention = call.attention
    assert attention is not None
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None and norm.size != attention.head_dim:
            raise NotDivisible(f"its norm {norm.weight.name} is over all heads together")


def _logits_matrix(trace: ForwardTrace) -> TracedMatrix:
    maker = trace.logits.maker
    while maker is not None and maker.operation in _ELEMENTWISE:
        maker = maker.inputs[0].maker
    if maker is None or maker.operation != "linear":
        raise NotDivisible("its logits are no product")
    return _matrix(maker)
