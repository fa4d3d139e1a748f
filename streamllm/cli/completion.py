"""``streamllm completion SHELL``: a script that completes commands, flags and their values, made from the
parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """What can follow the words of a command.

    Attributes:
        words: the command, without ``streamllm`` itself: ``("bench", "serve")``.
        subcommands: their names and what they are for.
        flags: and whether each takes a value.
        values: of those flags that take one of a few.
        help: of the flags.
    """

    words: tuple[str, ...]
    subcommands: dict[str, str]
    flags: dict[str, bool]
    values: dict[str, tuple[str, ...]]
    help: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(_SCRIPTS), help="the shell that is to complete")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    from streamllm.cli.main import build_parser

    print(_SCRIPTS[options.shell](list(commands_of(build_parser()[0]))), end="")
    return 0


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def innermost_command(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of the command that the arguments begin with, and the arguments behind it."""
    for index, word in enumerate(arguments):
        inner = subparsers_of(parser).get(word)
        if inner is None:
            return parser, arguments[index:]
        parser = inner
    return parser, []


def commands_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """``parser``'s command and all below it."""
    subparsers = subparsers_of(parser)
    helps: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: _plain(choice.help) for choice in action._choices_actions}
    flags, values, texts = {}, {}, {}
    for action in parser._actions:
        for flag in action.option_strings:
            flags[flag] = action.nargs != 0
            texts[flag] = _plain(action.help)
            if found := _values(action):
                values[flag] = found
    yield Command(words, {name: helps.get(name, "") for name in subparsers}, flags, values, texts)
    for name, subparser in subparsers.items():
        yield from commands_of(subparser, (*words, name))


def _values(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    metavar = action.metavar  # of settings, whose values are checked elsewhere
    if isinstance(metavar, str) and metavar.startswith("{"):
        return tuple(metavar.strip("{}").split(","))
    return ()


def _plain(text: str | None) -> str:
    """A help text's first sentence, without what a shell might read in it."""
    sentence = (text or "").replace("%%", "%").partition(". ")[0].rstrip(".")
    return "".join(c for c in sentence if c not in "\"'`$\\[]:" and c.isprintable())


# -- scripts -----------------------------------------------------------------------------------------------


def _quoted(words: tuple[str, ...]) -> str:
    return '"' + " ".join(words) + '"'


def _cases(commands: list[Command], line: Callable[[str], str]) -> tuple[str, str, str]:
    """Patterns of the commands' words, and case branches of flags' values and of what else may come next, for
    shells with POSIX's ``case``; ``line`` makes a command that offers words."""
    known = "|".join(_quoted(command.words) for command in commands if command.words)
    values = "\n".join(
        f"    {_quoted((*command.words, flag))}) {line(' '.join(choices))}; return ;;"
        for command in commands
        for flag, choices in command.values.items()
    )
    words = "\n".join(
        f"    {_quoted(command.words)}) {line(' '.join([*command.subcommands, *command.flags]))} ;;"
        for command in commands
    )
    return known, values, words


def _bash(commands: list[Command]) -> str:
    known, values, words = _cases(commands, lambda text: f'COMPREPLY=($(compgen -W "{text}" -- "$word"))')
    return f"""\
# bash completion of streamllm: source <(streamllm completion bash)
_streamllm() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" given="" i next
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="${{given:+$given }}${{COMP_WORDS[i]}}"
    case "$next" in
    {known}) given="$next" ;;
    *) break ;;
    esac
  done
  case "${{given:+$given }}$before" in
{values}
  esac
  case "$given" in
{words}
  esac
}}
complete -o default -F _streamllm streamllm
"""


def _zsh(commands: list[Command]) -> str:
    known, values, cases = _cases(commands, lambda text: f"offered=({text})")
    values = values.replace("); return ;;", "); compadd -a offered; return ;;")
    return f"""\
#compdef streamllm
# zsh completion of streamllm: source <(streamllm completion zsh)
_streamllm() {{
  local given="" before="${{words[CURRENT-1]}}" next
  local -i i
  local -a offered
  for ((i = 2; i < CURRENT; i++)); do
    next="${{given:+$given }}${{words[i]}}"
    case "$next" in
    {known}) given="$next" ;;
    *) break ;;
    esac
  done
  case "${{given:+$given }}$before" in
{values}
  esac
  case "$given" in
{cases}
  esac
  [[ -n "$given" && "${{words[CURRENT]}}" != -* ]] && _files
  compadd -a offered
}}
if [[ "${{funcstack[1]}}" = _streamllm ]]; then _streamllm "$@"; else compdef _streamllm streamllm; fi
"""


def _fish(commands: list[Command]) -> str:
    lines = [
        "# fish completion of streamllm: streamllm completion fish | source",
        "function __streamllm_at",
        "  set -l given (commandline -opc)[2..-1]",
        "  test (count $given) -ge (count $argv); or return 1",
        "  for i in (seq (count $argv))",
        '    test "$given[$i]" = "$argv[$i]"; or return 1',
        "  end",
        "end",
    ]
    for command in commands:
        at = f"__streamllm_at {' '.join(command.words)}".rstrip()
        nothing_more = f"{at}; and test (count (commandline -opc)) -eq {len(command.words) + 1}"
        for name, text in command.subcommands.items():
            lines.append(f"complete -c streamllm -f -n '{nothing_more}' -a {name} -d '{text}'")
        for flag, takes_value in command.flags.items():
            name = f"-l {flag[2:]}" if flag.startswith("--") else f"-o {flag[1:]}"
            name = f"-s {flag[1:]}" if len(flag) == 2 else name
            value = f" -x -a '{' '.join(command.values[flag])}'" if flag in command.values else ""
            value = value or (" -r" if takes_value else "")
            condition = at if command.words else nothing_more
            lines.append(f"complete -c streamllm -n '{condition}' {name}{value} -d '{command.help[flag]}'")
    return "\n".join(lines) + "\n"


_SCRIPTS: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
