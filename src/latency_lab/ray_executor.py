"""Measure engine starts as tasks of a Ray cluster: several GPUs of one host, or of many, at the same time.

Each start is one task that asks for the GPUs of its engine and for logical cores of its own; what runs there is in
ray_tasks.py. Results go to a folder that all hosts share, and this process looks there for what has ended. Ray is an
extra: nothing else imports it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from latency_lab import machine, measure, notebook, ray_tasks, signals
from latency_lab.study import Study

RETRIES = 3
"""How often a start whose host or worker was lost is begun again, for the cells that had not finished."""

POLL_S = 0.5
CONNECT_S = 5.0
LOOK_S = 120.0
END_PATIENCE_S = 90.0
ROWS_PATIENCE_S = 60.0
"""File servers let their clients believe this long that a file is not there."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would end the task that takes most memory; here that is the engine, whose size the study has chosen.
    "RAY_memory_monitor_refresh_ms": "0",
    # Its helpers may take long to load from a shared folder, or on a busy machine.
    "RAY_agent_register_timeout_ms": "60000",
}
OBJECT_STORE_BYTES = 80_000_000
"""Of a local Ray: next to nothing passes through it, and Ray would set aside 30 % of the memory."""

LOCAL_ATTEMPTS = 2
"""On a busy machine Ray may give up on itself, which it does after 30 s."""


class ClusterError(Exception):
    """A cluster that cannot be reached or cannot measure the study; the message is one line."""


@dataclass(frozen=True)
class Host:
    """One node of the cluster, with its logical cores and GPUs as Ray counts them."""

    node: str
    name: str
    cores: int
    gpus: int


@dataclass(frozen=True)
class Cluster:
    """The hosts that engines may run on: those with GPUs, or all of a cluster that has none.

    asked_cores : logical cores for each engine where the user said how many
    """

    hosts: tuple[Host, ...]
    asked_cores: int | None = None

    @property
    def gpu(self) -> bool:
        """Whether engines run on GPUs."""
        return any(host.gpus for host in self.hosts)

    def gpus(self, args: Mapping[str, Any]) -> int:
        """How many GPUs an engine with these arguments takes; none where the cluster has none."""
        wanted = (args.get("tensor_parallel_size") or 1) * (args.get("pipeline_parallel_size") or 1)
        return int(wanted) if self.gpu else 0

    def cores(self, gpus: int) -> int:
        """Logical cores of an engine on so many GPUs: its share of the smallest host, or without GPUs all of it."""
        if self.asked_cores is not None:
            return self.asked_cores
        if not self.gpu:
            return min(host.cores for host in self.hosts)
        return max(1, min(host.cores // host.gpus for host in self.hosts) * gpus)

    def lacks(self, label: str, args: Mapping[str, Any]) -> str | None:
        """Why no host can run a setting, in one line; None where one can."""
        gpus = self.gpus(args)
        cores = self.cores(gpus)
        most = max(host.gpus for host in self.hosts)
        if gpus > most:
            return f"{label}: needs {gpus} GPUs on one host, and the cluster's largest has {most}"
        if not any(host.gpus >= gpus and host.cores >= cores for host in self.hosts):
            widest = max(host.cores for host in self.hosts if host.gpus >= gpus)
            return f"{label}: {cores} logical cores asked for, and the cluster's largest host has {widest}"
        return None

    def order(self, job: measure.Job) -> ray_tasks.Order:
        """The engine start that `job` leads, as a task is told of it."""
        gpus = self.gpus(job.setting.args)
        study, runs, folder = (str(path.resolve()) for path in (job.study.path, job.runs, job.folder))
        return ray_tasks.Order(study, job.setting.label, runs, folder, job.force, gpus, self.cores(gpus))

    def check(self, study: Study) -> None:
        """Raises ClusterError where a setting fits on no host."""
        for setting in study.settings():
            if (problem := self.lacks(setting.label, setting.args)) is not None:
                raise ClusterError(f"{study.path}: {problem}")


def hosts(nodes: Sequence[Mapping[str, Any]]) -> tuple[Host, ...]:
    """The hosts that can measure, of nodes as `ray.nodes()` lists them."""
    found = [
        Host(
            node["NodeID"],
            node.get("NodeManagerHostname") or node["NodeManagerAddress"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in nodes
        if node["Alive"]
    ]
    with_gpus = [host for host in found if host.gpus and host.cores]
    return tuple(with_gpus or [host for host in found if host.cores])


@contextlib.contextmanager
def connected(address: str | None = None, cores: int | None = None) -> Iterator[Cluster]:
    """Join the cluster at `address` (default: RAY_ADDRESS), or start one on this machine that ends with the block.

    Raises ClusterError.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:  # or its helpers would listen to other machines (read when Ray is imported)
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise ClusterError("Ray is not installed in this environment: pip install -e '.[ray]'") from None
    if address is not None and (problem := _unreachable(address)) is not None:
        raise ClusterError(problem)
    where = {"address": address} if address is not None else _local()
    for attempt in range(LOCAL_ATTEMPTS if address is None else 1):
        try:
            ray.init(**where, logging_level="ERROR", log_to_driver=False)
            break
        except Exception as error:
            ray.shutdown()
            if address is not None or attempt + 1 == LOCAL_ATTEMPTS:
                raise ClusterError(f"Ray at {address or 'this machine'}: {_first_line(error)}") from error
    try:
        found = hosts(ray.nodes())
        if not found:
            raise ClusterError(f"Ray at {address}: no node with CPUs is alive")
        yield Cluster(found, cores)
    finally:
        ray.shutdown()


def look_around(cluster: Cluster, study: Study, folder: Path) -> list[str]:
    """See that every host can measure the study as this one would, before anything starts.

    Returns lines for the user: who measures, and what was ended there. Raises ClusterError.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cores = cluster.cores(1)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    probe.write_text(probe.name)
    answers = {host: folder / f"{probe.name}.{number}" for number, host in enumerate(cluster.hosts)}
    task = ray.remote(ray_tasks.look)
    text = study.path.read_text()
    try:
        asked = {
            host: task.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(host.node, soft=False)
            ).remote(str(study.path.resolve()), text, str(folder.parent), str(probe), str(answer), cores)
            for host, answer in answers.items()
        }
        seen = {host: _answer(host, ref) for host, ref in asked.items()}
        for host, answer in answers.items():
            if not ray_tasks.appears(answer):
                raise ClusterError(f"{host.name}: {folder} is not shared with this machine")
    finally:
        for path in (probe, *answers.values()):
            path.unlink(missing_ok=True)
    own = (machine.device(None if cluster.gpu else cores), machine.vllm_version())
    for host, node in seen.items():
        if (node.device, node.vllm_version) != own:
            there, here = (f"{device}, vLLM {version}" for device, version in ((node.device, node.vllm_version), own))
            raise ClusterError(
                f"{host.name} would measure with {there}, and this machine with {here}: start on its like"
            )
    gpus = sum(host.gpus for host in cluster.hosts)
    lines = [f"Ray: {len(cluster.hosts)} hosts with {gpus} GPUs; {cores} logical cores for an engine of one GPU"]
    if not cluster.gpu:
        lines = [f"Ray: {len(cluster.hosts)} hosts, {cores} logical cores for each engine"]
    return lines + [f"ended a process left over from an earlier engine: {host.name}: {line}"
                    for host, node in seen.items() for line in node.ended]  # fmt: skip


def run(cluster: Cluster, todo: list[measure.Job], bar: tqdm, say_stopping: Callable[[], None]) -> bool:
    """Measure the engine starts, as many at a time as the cluster has room for, in their order, moving the bar.

    A start that is lost for good, or that its host refuses, has rows that say why. Returns false where Ctrl-C ended it.
    """
    import ray

    task = ray.remote(ray_tasks.start)
    ended = {job.folder: notebook.Ended(job) for job in todo}
    left: dict[Any, measure.Job] = {}
    for job in todo:
        (job.folder / measure.CURRENT).unlink(missing_ok=True)
        order = cluster.order(job)
        shape = {"num_cpus": order.cores, "num_gpus": order.gpus, "max_retries": RETRIES, "name": job.setting.label}
        left[task.options(**shape).remote(order)] = job
    cancelled_at: float | None = None
    whole = True
    with signals.collected(say_stopping) as interrupted:
        while left:
            for ref in ray.wait(list(left), timeout=POLL_S)[0]:
                job = left.pop(ref)
                whole &= _settle(job, ref, ended[job.folder], bool(interrupted))
            bar.set_postfix_str(under_way(left.values()), refresh=False)
            bar.update(sum(one.count() for one in ended.values()) - bar.n)
            if interrupted and cancelled_at is None:
                cancelled_at = time.monotonic()
                for ref in left:
                    ray.cancel(ref)
            if cancelled_at is not None and time.monotonic() > cancelled_at + END_PATIENCE_S:
                break  # what still runs ends with its worker, which ends with this process
    return whole and not left


def under_way(jobs: Iterable[measure.Job]) -> str:
    """What is measured at this moment, for the bar: the first two engines, and how many others."""
    at_work = [job for job in jobs if (job.folder / measure.CURRENT).exists()]
    named = [f"{job.setting.label}: {notebook.current(job)}" for job in at_work[:2]]
    return "; ".join(named) + (f" and {len(at_work) - 2} others" if len(at_work) > 2 else "")


def _settle(job: measure.Job, ref: Any, ended: notebook.Ended, interrupted: bool) -> bool:
    """See that a start that has ended has its rows. Returns false where it was cancelled."""
    import ray

    try:
        if not ray.get(ref):
            return False
    except ray.exceptions.TaskCancelledError:
        return False
    except ray.exceptions.RayError as error:
        if interrupted:
            return False
        cause = getattr(error, "cause", None) or error
        message = str(cause) if isinstance(cause, ray_tasks.TaskError) else f"lost by Ray: {_first_line(cause)}"
        tqdm.write(f"{job.setting.label}: {message}")
        notebook.cells_due(job)
        for member in job.members:
            member.give_up("failed", message)
        return True
    deadline = time.monotonic() + ROWS_PATIENCE_S
    while ended.count() < len(ended) and time.monotonic() < deadline:
        for member in job.members:
            with contextlib.suppress(OSError):
                os.listdir(member.folder)  # has a file server's client ask again
        time.sleep(POLL_S)
    return True


def _answer(host: Host, ref: Any) -> ray_tasks.Node:
    import ray

    try:
        node = ray.get(ref, timeout=LOOK_S)
    except ray.exceptions.RayError as error:
        raise ClusterError(f"{host.name}: {_first_line(getattr(error, 'cause', None) or error)}") from error
    if node.problem is not None:
        raise ClusterError(f"{host.name}: {node.problem}")
    return node


def _local() -> dict[str, Any]:
    """How a Ray of this machine alone is started."""
    return {
        "address": "local",
        "num_cpus": machine.cores(),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_node_ip_address": "127.0.0.1",
    }


def _unreachable(address: str) -> str | None:
    """Why a cluster's address cannot be used, in one line, found out sooner than Ray would; None where it can."""
    if address == "auto":
        return None
    if "://" in address:
        return f"{address}: start the sweep on a host of the cluster, with its address as HOST:PORT or auto"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return f"{address}: not a Ray address; allowed: HOST:PORT or auto"
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        return f"{address}: no Ray cluster answers there ({getattr(error, 'strerror', None) or error})"
    return None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[0] if lines else type(error).__name__}"[:300]
