"""Which sequences may run ahead of what is known of them.

With a queue of several steps (:attr:`streamllm.engine.step.Limits.queue_depth`) a step is scheduled and
submitted while the one before it is still drawing tokens: the accelerator never waits for the host. A
sequence that runs ahead has *pending* tokens then. They count for its length, and so for positions, blocks
and limits; the runner takes their ids from the device, where they were drawn. What depends on an id waits
until it is known: the prefix cache does not learn of a block before. A sequence that turns out to have ended
is in one step too many; the token drawn there is dropped.

A sequence never runs past an end that is known beforehand: its last token by length is not pending, and
neither is any token of a sequence whose next draw depends on ids, so these wait for each token.
"""

from __future__ import annotations

from streamllm.engine.request import Request


def allow(request: Request) -> None:
    """Set how far a request's sequences may run ahead."""
    if request.beams is not None or request.prompt_only or request.embedding is not None:
        return
    if request.rules is not None and request.rules.depend_on_output:
        return
    longest = request.max_total_tokens
    if request.params.max_tokens is not None:
        longest = min(longest, len(request.prompt_token_ids) + request.params.max_tokens)
    for sequence in request.sequences:
        if sequence.grammar is None:
            sequence.run_ahead_limit = longest - 1
