"""From a model's text to reasoning, content and tool calls, piece by piece.

A model writes tool calls and reasoning into its text, each family in its own format. A parser here reads one
format (:mod:`~streamllm.parsers.registry` lists them by vLLM's names), incrementally: however the text is
cut, the events are the same, and :func:`~streamllm.parsers.events.collect` makes the message for an answer
that is not streamed out of the very same events.

What all formats have in common:

* Text that looks like the beginning of a call and is none is content, as it stands. So is a call of a tool
  that the request does not have, or one whose frame is broken before its arguments begin.
* Once arguments have begun, they stay: broken or cut off, they are the text of that call's arguments. What
  follows a broken call is content.
* Whitespace next to calls belongs to the format. It is content only where it parts content from content.
"""
