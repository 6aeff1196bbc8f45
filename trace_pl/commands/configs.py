"""The configs that are shipped, found by bare name: `--config quickstart`, `trace-pl configs`."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from trace_pl.commands.parser import PlainParser
from trace_pl.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def command(arguments: list[str]) -> None:
    """Run `trace-pl configs`: list what is shipped, or print one of them."""
    parser = PlainParser(
        "trace-pl configs",
        description="Lists the configs that are shipped. `--config NAME` takes each of them by "
        "name, and several of them lie over each other: --config qwen3_4b --config options/lora",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", help="print this one, to begin a file of your own from")
    name = parser.parse_args(arguments).name
    print(render_list() if name is None else find_config(name).read_text(encoding="utf-8").rstrip())


def shipped_folder() -> Path:
    """Return the folder of the shipped configs: in the package, or beside it in a clone."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def shipped_names() -> list[str]:
    """Return the names of the shipped configs, complete runs first."""
    folder = shipped_folder()
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def find_config(name: str) -> Path:
    """Return the file that a name stands for; a file of the user's own comes first.

    Args:
        name: A path, or the name of a shipped config with or without `configs/` and `.yaml`.

    Raises:
        ConfigError: if there is neither.
    """
    own = Path(name).expanduser()
    if own.is_file():
        return own
    bare = name.removeprefix("configs/").removesuffix(".yaml")
    names = shipped_names()
    if bare in names:
        return shipped_folder() / f"{bare}.yaml"
    lasts = {each: each.rsplit("/", 1)[-1] for each in names}
    last = bare.rsplit("/", 1)[-1]
    close = [each for each, end in lasts.items() if end == last]
    close += [each for each in get_close_matches(bare, names, n=3, cutoff=0.7) if each not in close]
    if not close:
        ends = get_close_matches(last, lasts.values(), n=3, cutoff=0.7)
        close = [each for each, end in lasts.items() if end in ends]
    hint = f" Did you mean {' or '.join(f'`{each}`' for each in close[:3])}?" if close else ""
    raise ConfigError(
        f"Expected a config file or the name of a shipped config, got '{name}'.{hint} "
        "`trace-pl configs` lists them."
    )


def with_config_paths(arguments: list[str]) -> list[str]:
    """Return the arguments of a run with the names of configs replaced by their files.

    Raises:
        ConfigError: if there is no config of a name.
    """
    found = list(arguments)
    for place, option in _configs(arguments):
        value = found[place].removeprefix(option)
        is_text = "\n" in value or value.lstrip().startswith(("{", "["))  # a config, not its name
        found[place] = option + (value if is_text else str(find_config(value)))
    return found


def config_files(arguments: list[str]) -> list[Path]:
    """Return the config files that arguments name."""
    paths = [Path(arguments[place].removeprefix(option)) for place, option in _configs(arguments)]
    return [path for path in paths if path.is_file()]


def _configs(arguments: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the places of config names, each with what stands before it in its argument."""
    for place, argument in enumerate(arguments):
        if argument.startswith("--config="):
            yield place, "--config="
        elif place > 0 and arguments[place - 1] in ("--config", "-c") and argument[:2] != "--":
            yield place, ""


def render_list() -> str:
    """Return the names of the shipped configs, each with what it is for."""
    names = shipped_names()
    width = max(map(len, names))
    folder = shipped_folder()
    rows = [f"{name:<{width}}  {purpose(folder / f'{name}.yaml')}" for name in names]
    return "\n".join([*rows, "", f"in {folder}"])


def purpose(path: Path) -> str:
    """Return the first sentence of the comment that a config begins with."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("# ").split()
        ends = [place for place, word in enumerate(words) if word.endswith((".", ":", ";"))]
        if ends:
            return " ".join(words[: ends[0] + 1]).rstrip(".:;")
    return " ".join(words)
