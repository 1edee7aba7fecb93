"""The environment: pins agree with what is declared, and `make setup` says in one line what is missing.

setup.sh runs here in a copy of its folder, on a PATH of stubs: no network, nothing installed.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
KEPT_OUT = {"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"}
TOOLS = "awk bash cat cp cut df dirname du flock grep head mkdir rm sed sh sha256sum tail"

# Stands for a working Python: knows its version, makes a venv (copying itself there), has a pip that obeys.
PYTHON_STUB = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
    *version_info*) echo "${STUB_VERSION:-3.11}" ;;
    *libnuma*) exit "${STUB_LIBNUMA_EXIT:-0}" ;;
    *ensurepip*) exit "${STUB_ENSUREPIP_EXIT:-0}" ;;
    "-m venv "*) mkdir -p .venv/bin .venv/lib/python3.11/site-packages/pip && cp "$0" .venv/bin/python ;;
    *"--extra-index-url "*) exit "${STUB_INDEX_EXIT:-0}" ;;
    "-m pip install "*torch==*) echo "$STUB_TORCH_SAYS"; exit "${STUB_TORCH_EXIT:-0}" ;;
    "-m pip install "*) echo "$STUB_PIP_SAYS"; exit "${STUB_PIP_EXIT:-0}" ;;
esac
"""


@dataclass
class Sandbox:
    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def tool(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.unlink(missing_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def setup(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh with nothing on PATH but the tools and stubs, and forget the calls of earlier runs."""
        (self.folder / "calls").write_text("")
        paths = {"PATH": str(self.folder / "bin"), "CALLS": str(self.folder / "calls")}
        return subprocess.run(
            ["bash", "requirements/setup.sh"],
            cwd=self.folder,
            env={**paths, **self.env, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, what: str) -> list[str]:
        return [line for line in (self.folder / "calls").read_text().splitlines() if what in line]


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS.split():
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    box = Sandbox(tmp_path)
    box.tool("uname", "#!/bin/sh\necho Linux\n")
    box.tool("df", "#!/bin/sh\nprintf 'head\\ndisk 1 1 99000000 1 /\\n'\n")
    box.tool("python3", PYTHON_STUB)
    return box


def pins(name: str) -> dict[str, str]:
    """The lock's versions by package, for the running Python."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    kept = [one for one in found if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in kept}


def declared(*extras: str) -> dict[str, Requirement]:
    """pyproject.toml's requirements by package: the base ones and those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [one for extra in extras for one in project["optional-dependencies"][extra]]
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)}


def only_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = result.stderr.splitlines()
    assert result.returncode != 0 and len(lines) == 1, result
    return lines[0]


# What is declared, what is pinned, what is installed


@pytest.mark.parametrize(("lock", "extra"), [("cpu.txt", "cpu"), ("gpu.txt", "gpu")])
def test_the_lock_lies_within_the_declared_ranges(lock: str, extra: str) -> None:
    pinned = pins(lock)
    for name, requirement in declared(extra, "ray", "test").items():
        assert name in pinned, f"{lock} lacks {name}"
        assert requirement.specifier.contains(pinned[name]), f"{lock}: {name} {pinned[name]}, not {requirement}"


def test_locks_pin_exactly_and_name_no_other_source() -> None:
    for lock in ("cpu.txt", "gpu.txt"):
        for line in (ROOT / "requirements" / lock).read_text().splitlines():
            assert re.fullmatch(r"#.*|[a-z0-9-]+==[\w.+]+(; .*)?", line), f"{lock}: {line}"


def test_the_cpu_lock_keeps_out_what_breaks_beside_the_cpu_torch() -> None:
    assert not KEPT_OUT & pins("cpu.txt").keys()
    assert pins("cpu.txt")["torch"].endswith("+cpu")


def test_both_locks_pin_the_same_analysis_tools() -> None:
    cpu, gpu, tools = pins("cpu.txt"), pins("gpu.txt"), declared("ray", "test")
    assert {name: cpu[name] for name in tools} == {name: gpu[name] for name in tools}


def test_conda_and_pyproject_declare_the_same() -> None:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    listed = next(entry["pip"] for entry in dependencies if isinstance(entry, dict))
    conda = [Requirement(line) for line in listed if not line.startswith("-")]
    assert {canonicalize_name(one.name): one for one in conda} == declared("gpu", "ray", "test")


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="runs in the .venv of make setup only")
def test_what_is_installed_is_what_is_pinned() -> None:
    flavour = (ROOT / ".venv" / ".made").read_text().split()[0]
    # This folder alone: other tests import setuptools, which puts copies of its own dependencies on sys.path.
    here = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    installed = {canonicalize_name(one.name): one.version for one in here}
    pinned = pins(f"{flavour}.txt")
    assert {name: installed.get(name) for name in pinned} == pinned
    assert flavour == "gpu" or not KEPT_OUT & installed.keys()


# What set-up says when it cannot go on: one line, and what to do


def test_python_too_old(sandbox: Sandbox) -> None:
    line = only_line(sandbox.setup(STUB_VERSION="3.9"))
    assert "needs Python 3.11 or newer" in line and "python3 is Python 3.9" in line
    assert "make setup PYTHON=/path/to/python3" in line
    assert not (sandbox.folder / ".venv").exists()


def test_no_python(sandbox: Sandbox) -> None:
    (sandbox.folder / "bin" / "python3").unlink()
    assert "needs Python 3.11 or newer, found none" in only_line(sandbox.setup())


def test_the_named_python_is_not_there(sandbox: Sandbox) -> None:
    assert "found none at /nowhere/python" in only_line(sandbox.setup(PYTHON="/nowhere/python"))


def test_a_shim_with_nothing_behind_it_is_passed_over(sandbox: Sandbox) -> None:
    sandbox.tool("python3.12", "#!/bin/sh\necho 'no such version' >&2\nexit 127\n")
    assert sandbox.setup().returncode == 0


def test_python_without_its_venv_module(sandbox: Sandbox) -> None:
    assert "apt install python3-venv" in only_line(sandbox.setup(STUB_ENSUREPIP_EXIT="1"))


def test_no_libnuma(sandbox: Sandbox) -> None:
    assert "apt install libnuma1" in only_line(sandbox.setup(STUB_LIBNUMA_EXIT="1"))
    assert sandbox.setup(STUB_LIBNUMA_EXIT="1", FLAVOUR="gpu").returncode == 0


def test_no_disk(sandbox: Sandbox) -> None:
    sandbox.tool("df", "#!/bin/sh\nprintf 'head\\ndisk 1 1 2097152 1 /\\n'\n")
    line = only_line(sandbox.setup())
    assert "needs about 6 GB" in line and "has 2 GB free" in line
    assert not sandbox.calls("pip install")


def test_no_network(sandbox: Sandbox) -> None:
    says = "WARNING: Temporary failure in name resolution\nERROR: No matching distribution found for torch"
    line = only_line(sandbox.setup(STUB_TORCH_SAYS=says, STUB_TORCH_EXIT="1", STUB_INDEX_EXIT="1"))
    assert "check the network" in line and ".venv/setup.log" in line
    assert not (sandbox.folder / ".venv" / ".ready").exists()


def test_another_pip_failure_is_quoted(sandbox: Sandbox) -> None:
    line = only_line(sandbox.setup(STUB_PIP_SAYS="ERROR: no wheel for this machine", STUB_PIP_EXIT="1"))
    assert "pip failed: ERROR: no wheel for this machine" in line


def test_a_flavour_that_is_none(sandbox: Sandbox) -> None:
    assert "must be cpu or gpu" in only_line(sandbox.setup(FLAVOUR="tpu"))


# When it installs, and what


def test_a_second_run_does_nothing(sandbox: Sandbox) -> None:
    assert sandbox.setup().returncode == 0
    assert sandbox.calls("-m venv") and sandbox.calls("pip install")
    again = sandbox.setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert not sandbox.calls("-m venv") and not sandbox.calls("pip")


def test_a_half_built_venv_is_installed_again(sandbox: Sandbox) -> None:
    sandbox.setup(STUB_PIP_EXIT="1")
    cut_off = sandbox.folder / ".venv/lib/python3.11/site-packages/torch-2.dist-info"
    cut_off.mkdir()
    assert sandbox.setup().returncode == 0
    assert sandbox.calls("pip install") and not sandbox.calls("-m venv")
    assert not cut_off.exists(), "pip would take it for installed"


def test_a_changed_lock_is_installed(sandbox: Sandbox) -> None:
    sandbox.setup()
    with (sandbox.folder / "requirements" / "cpu.txt").open("a") as lock:
        lock.write("new-package==1.0\n")
    sandbox.setup()
    assert sandbox.calls("pip install") and not sandbox.calls("-m venv")


def test_a_venv_whose_python_is_gone_is_made_again(sandbox: Sandbox) -> None:
    sandbox.setup()
    (sandbox.folder / ".venv/bin/python").unlink()
    assert sandbox.setup().returncode == 0
    assert sandbox.calls("-m venv") and sandbox.calls("pip install")


def test_a_gpu_gets_the_gpu_packages(sandbox: Sandbox) -> None:
    sandbox.tool("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA L4'\n")
    sandbox.setup()
    assert sandbox.calls("-r requirements/gpu.txt") and not sandbox.calls("cpu.txt")


def test_a_chosen_flavour_is_kept(sandbox: Sandbox) -> None:
    sandbox.tool("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA L4'\n")
    sandbox.setup(FLAVOUR="cpu")
    assert sandbox.calls("-r requirements/cpu.txt")
    sandbox.setup()
    assert not sandbox.calls("pip")


def test_another_flavour_starts_afresh(sandbox: Sandbox) -> None:
    sandbox.setup(FLAVOUR="cpu")
    sandbox.setup(FLAVOUR="gpu")
    assert sandbox.calls("-m venv --clear") and sandbox.calls("-r requirements/gpu.txt")


def test_torch_falls_back_to_the_named_index(sandbox: Sandbox) -> None:
    says = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    found = sandbox.setup(STUB_TORCH_SAYS=says, STUB_TORCH_EXIT="1", TORCH_INDEX_URL="file:///wheels")
    assert found.returncode == 0, found
    assert len(sandbox.calls("--extra-index-url file:///wheels torch==2.13.0+cpu")) == 1


# The Makefile


def make(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_help_is_the_default_and_lists_every_target() -> None:
    listed = make()
    for target in ["setup", "study", "sweep", "report", "test", "verify", "lab", "bench", "lint", "clean"]:
        assert re.search(rf"^  make {target} +\w", listed, re.MULTILINE), target


@pytest.mark.parametrize("target", ["study", "report", "test", "verify", "lab", "bench"])
def test_every_target_sets_up_first(target: str) -> None:
    assert "requirements/setup.sh" in make("-n", target).splitlines()[0]


def test_sweep_asks_for_a_study() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make("sweep")
    assert "make sweep STUDY=notebooks/studies/NAME.yaml" in refused.value.stderr
