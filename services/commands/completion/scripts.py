"""The scripts themselves. They hold all that they need: nothing runs when Tab is pressed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.services.commands.completion.declared import Completable, Flag

_BASH = """\
# Completion of penstock for bash.
_penstock() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    # "--flag=value" comes as three words.
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    COMPREPLY=()
    local command="${{COMP_WORDS[1]}}" words="" files=""
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
        return
    fi
    if (( COMP_CWORD > 2 )); then
        case "$command ${{COMP_WORDS[2]}}" in
            {subcommands}) command="$command ${{COMP_WORDS[2]}}" ;;
        esac
    fi
    case "$command $previous" in
{values}
    esac
    if [[ $previous == -* && -n $words$files ]]; then
        [[ $words == "-" ]] && return
        if [[ -n $files ]]; then
            compopt -o filenames
            COMPREPLY=($(compgen -f -- "$current"))
        else
            COMPREPLY=($(compgen -W "$words" -- "$current"))
        fi
        return
    fi
    case "$command" in
{commands}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ -n $files && $current != -* ]]; then
        compopt -o filenames
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}}
complete -F _penstock penstock
"""
_ZSH = """\
#compdef penstock
# Completion of penstock for zsh.
_penstock() {{
    local -a commands
    if (( CURRENT == 2 )); then
        commands=(
{names}
        )
        _describe -t commands command commands
        return
    fi
    local command=$words[2]
    words=("${{(@)words[2,-1]}}")
    (( CURRENT-- ))
    if (( CURRENT > 2 )); then
        case "$command $words[2]" in
            {subcommands})
                command="$command $words[2]"
                words=("${{(@)words[2,-1]}}")
                (( CURRENT-- ))
                ;;
        esac
    fi
    case $command in
{commands}
    esac
}}
if [[ $funcstack[1] == _penstock ]]; then
    _penstock "$@"
else
    compdef _penstock penstock
fi
"""
_FISH = """\
# Completion of penstock for fish.
function __penstock_is
    set -l words (commandline -opc)
    set -l last (math (count $argv) + 1)
    test (count $words) -ge $last; or return 1
    test "$words[2..$last]" = "$argv"
end
complete -c penstock -f
"""


def bash(commands: Sequence[Completable]) -> str:
    values, listed = [], []
    for command in commands:
        for flag in command.flags:
            if flag.takes_value:
                names = "|".join(f'"{command.name} {spelling}"' for spelling in flag.spellings)
                what = (
                    "files=1" if flag.files else f"words={_quoted(' '.join(flag.choices) or '-')}"
                )
                values.append(f"        {names}) {what} ;;")
        words = " ".join([*command.words, *_spellings(command.flags)])
        files = " files=1" if command.files else ""
        listed.append(f"        {_quoted(command.name)}) words={_quoted(words)}{files} ;;")
    return _BASH.format(
        names=" ".join(_names(commands)),
        subcommands=_patterns(commands),
        values="\n".join(values),
        commands="\n".join(listed),
    )


def zsh(commands: Sequence[Completable]) -> str:
    names = [
        f"            {_quoted(_zsh_escaped(one.name) + ':' + one.summary)}"
        for one in commands
        if " " not in one.name
    ]
    listed = []
    for command in commands:
        specs = [spec for flag in command.flags for spec in _zsh_flag(flag)]
        if command.words:
            specs.append(f"1:argument:({' '.join(command.words)})")
        if command.files:
            specs.append("*:path:_files")
        arguments = " ".join(map(_quoted, specs))
        body = f"_arguments {arguments}" if specs else ":"
        listed.append(f"        {_quoted(command.name)}) {body} ;;")
    return _ZSH.format(
        names="\n".join(names), subcommands=_patterns(commands), commands="\n".join(listed)
    )


def _zsh_flag(flag: Flag) -> Iterable[str]:
    text = flag.help.replace("\\", "").replace("[", "(").replace("]", ")").replace(":", "\\:")
    value = ""
    if flag.takes_value:
        action = "_files" if flag.files else f"({' '.join(flag.choices)})" if flag.choices else ""
        value = f":value:{action}"
    star = "*" if flag.repeated else ""
    for spelling in flag.spellings:
        # A long flag takes its value behind an equals sign as well.
        joined = "=" if flag.takes_value and spelling.startswith("--") else ""
        yield f"{star}{spelling}{joined}[{text}]{value}"


def fish(commands: Sequence[Completable]) -> str:
    lines = [_FISH]
    for command in commands:
        if " " not in command.name:
            lines.append(
                f"complete -c penstock -n __fish_use_subcommand -a {command.name} "
                f"-d {_fish_quoted(command.summary)}"
            )
        condition = f"-n {_fish_quoted('__penstock_is ' + command.name)}"
        for flag in command.flags:
            parts = [f"complete -c penstock {condition}"]
            for spelling in flag.spellings:
                long = spelling.startswith("--")
                parts.append(f"-l {spelling[2:]}" if long else f"-s {spelling[1:]}")
            if flag.takes_value:
                parts.append("-r -F" if flag.files else "-x")
            if flag.choices:
                parts.append(f"-a {_fish_quoted(' '.join(flag.choices))}")
            parts.append(f"-d {_fish_quoted(flag.help)}")
            lines.append(" ".join(parts))
        if command.words:
            words = _fish_quoted(" ".join(command.words))
            lines.append(f"complete -c penstock {condition} -a {words}")
        if command.files:
            lines.append(f"complete -c penstock {condition} -F")
    return "\n".join(lines) + "\n"


def _names(commands: Iterable[Completable]) -> list[str]:
    return [one.name for one in commands if " " not in one.name]


def _patterns(commands: Iterable[Completable]) -> str:
    """The commands of two words, as a pattern of ``case``."""
    return "|".join(_quoted(one.name) for one in commands if " " in one.name)


def _spellings(flags: Iterable[Flag]) -> list[str]:
    return [spelling for flag in flags for spelling in flag.spellings]


def _quoted(text: str) -> str:
    """For bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _zsh_escaped(text: str) -> str:
    return text.replace(":", "\\:")


SCRIPTS: dict[str, Callable[[Sequence[Completable]], str]] = {
    "bash": bash, "zsh": zsh, "fish": fish,
}  # fmt: skip
