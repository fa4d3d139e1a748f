"""``--help=TOPIC``: a part of a long help."""

from __future__ import annotations

import argparse
import difflib

from streamllm.errors import ConfigError

EPILOG = (
    "--help=GROUP, --help=FLAG or --help=WORD shows a part of this: --help=engine, --help=port, --help=cache."
)


def help_topic(arguments: list[str]) -> str | None:
    """What the first ``--help=TOPIC`` of the arguments asks for."""
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return next((flag.partition("=")[2] for flag in flags if flag.startswith("--help=")), None)


def format_topic(parser: argparse.ArgumentParser, topic: str) -> str:
    """The help of ``all``, of a group of flags by the first word of its title, of a flag, or of all flags
    whose name or help holds a word; the first of these that there is.

    Raises:
        ConfigError: none is about ``topic``.
    """
    wanted = topic.strip().lower()
    if wanted == "all":
        return parser.format_help()
    groups = [group for group in parser._action_groups if group._group_actions]
    for group in groups:
        if wanted in (_name(group), (group.title or "").lower()):
            return _format(parser, [(group.title, group._group_actions)])
    flag = "--" + wanted.lstrip("-").replace("_", "-")
    one = [
        action
        for action in parser._actions
        if flag in action.option_strings or wanted in action.option_strings
    ]
    if one:
        return _format(parser, [(None, one)])
    found = [(group.title, [a for a in group._group_actions if _is_about(a, wanted)]) for group in groups]
    if not wanted or not any(actions for _, actions in found):
        names = [name for action in parser._actions for name in action.option_strings]
        close = difflib.get_close_matches(flag, names, n=1)
        hint = f"Did you mean {close[0][2:]}?" if close else f"Groups: {', '.join(map(_name, groups))}."
        raise ConfigError(f"--help={topic}: no group, flag or word of the help. {hint}")
    return _format(parser, [(title, actions) for title, actions in found if actions])


def _name(group: argparse._ArgumentGroup) -> str:
    return (group.title or "").split(" (")[0].lower()


def _is_about(action: argparse.Action, word: str) -> bool:
    texts = [*action.option_strings, str(action.help or "")]
    return any(word in text.lower() for text in texts)


def _format(parser: argparse.ArgumentParser, sections: list[tuple[str | None, list[argparse.Action]]]) -> str:
    formatter = parser._get_formatter()
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()
