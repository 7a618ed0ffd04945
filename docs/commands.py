"""The page docs/reference/commands.md, from the tree of the command line."""

from __future__ import annotations

from coterie.cli.arguments import COMMANDS, OF_PRESET, Argument, Command, arg

TEXT = """# Commands

Every command and its own options; `coterie COMMAND --help` shows the same. Settings of a run, which `train`, `bench`,
`plan`, `envs` and `actor` take as well, are under [options](options.md).
[Exit codes](run-folder.md#exit-codes): 0 finished, 1 failed, 2 bad usage or settings, 75 checkpointed on a signal.

"""
PRESET = arg("preset", help="a preset, `package.module:function`, or FILE.toml, FILE.yaml or FILE.json")


def cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


def row(argument: Argument) -> str:
    """One line of a command's table."""
    names, about = argument
    value = about.get("metavar") or ("" if about.get("action") == "store_true" else "TEXT")
    if not names[0].startswith("-"):
        return f"| `{names[0].upper()}` | {cell(about['help'])} |"
    option = " or ".join(f"`{name}{f' {cell(value)}' if value else ''}`" for name in names if "_" not in name)
    more = "; repeatable" if about.get("action") == "append" and "repeatable" not in about["help"] else ""
    return f"| {option} | {cell(about['help'])}{more} |"


def section(name: str, command: Command) -> str:
    text = f"## coterie {name}\n\n```text\ncoterie {name} {command.usage}".rstrip() + "\n```\n\n"
    text += f"{command.help[0].upper()}{command.help[1:]}.\n"
    of_preset = (PRESET, *OF_PRESET) if command.settings == "preset" else ()
    if options := (*of_preset, *command.options):
        text += "\n| argument | meaning [default] |\n|---|---|\n" + "\n".join(map(row, options)) + "\n"
    return text


def commands(note: str) -> str:
    """The whole page; `note` says what writes it."""
    return f"{TEXT}{note}\n" + "\n".join(section(name, command) for name, command in COMMANDS.items())
