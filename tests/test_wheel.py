"""The wheel holds all that a run needs, and works without the clone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """What `pip install trace-pl` puts into site-packages."""
    builders = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    builder = builders.WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def files_below(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "__pycache__" not in name}


def test_the_wheel_holds_the_packages_and_the_configs(unpacked):
    configs = files_below(ROOT / "configs")
    assert files_below(unpacked / "trace_pl" / "configs") == configs
    inside = {f"configs/{name}" for name in configs}
    assert files_below(unpacked / "trace_pl") - inside == files_below(ROOT / "trace_pl")
    assert files_below(unpacked / "callbacks") == files_below(ROOT / "callbacks")


def test_the_wheel_finds_its_configs_from_another_folder(unpacked, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "trace_pl", "configs", "quickstart"],
        cwd=tmp_path, env={"PYTHONPATH": str(unpacked)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.strip() == (ROOT / "configs" / "quickstart.yaml").read_text().strip()
    program = (unpacked / "trace_pl-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert "trace-pl = trace_pl.commands.main:main" in program
