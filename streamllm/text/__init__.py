"""Text in and out: tokenizer, chat template, incremental detokeniser, stop strings.

- :class:`streamllm.text.tokenizer.Tokenizer`: text to token ids and back, from a folder or a GGUF.
- :class:`streamllm.text.detokenizer.IncrementalDetokenizer`: token ids to text as they are generated.
- :class:`streamllm.text.stop.StopStrings`: stop strings found in a stream of text.
- :class:`streamllm.text.chat_template.ChatTemplate`: a conversation to the prompt's text.
- :func:`streamllm.text.messages.normalise_messages`: a client's messages to what a template expects.
"""
