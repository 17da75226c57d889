"""Process group and device mesh."""

import atexit
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.config.schema import AXES, BATCH_AXES, GRADIENT_AXES, SHARD_AXES, MeshConfig, axis_meanings
from shardwise.distributed.agreement import gather_objects
from shardwise.distributed.launchers import Launch, read_launch, rendezvous_error
from shardwise.errors import EnvironmentProblem, PlanError


def device_type() -> str:
    """Return the type of this machine's accelerator; `cpu` if there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


def axis_names(mesh: DeviceMesh) -> dict[str, str]:
    """Map the meaning of each mesh axis (one of `AXES`) to its name; outermost first.

    Axes of one rank are left out, except `shard` and `replicate`. A single unnamed axis means `shard`.
    """
    if mesh.mesh_dim_names is None:
        if mesh.ndim == 1:
            return {"shard": ""}
        raise PlanError(
            f"the {mesh.ndim}-D mesh has no axis names",
            where="mesh",
            why="the axis names determine their meaning",
            fix='init_device_mesh(..., mesh_dim_names=("replicate", "shard")), or init_distributed(MeshConfig(...))',
        )
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    if odd := [name for name in ("sp", "sequence") if sizes.get(name, 1) > 1]:
        raise PlanError(
            f"the mesh axis {odd[0]!r} has {sizes[odd[0]]} ranks, and its name is ambiguous",
            where=f"mesh axes {', '.join(sizes)}",
            why="sequence parallelism divides norms over the tensor axis; long sequences are divided over the context "
            "axis: on the wrong one weights would diverge without an error",
            fix="name the axis tensor or context, as init_distributed(MeshConfig(shard=..., context=...)) does",
        )
    meanings = axis_meanings([name for name in sizes if name not in ("sp", "sequence")])
    kept = {meaning: name for name, meaning in meanings.items() if sizes[name] > 1 or meaning in ("replicate", "shard")}
    if "shard" not in kept:
        raise PlanError(
            f"the mesh has no shard axis: {', '.join(sizes)}",
            where=f"mesh axes {', '.join(sizes)}",
            why="parameters are sharded over the axis 'shard', which needs at least one rank",
            fix="pass the full mesh, or create it with init_distributed(MeshConfig(shard=..., tensor=...))",
        )
    return kept


def axis_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Map the meaning of each mesh axis (one of `AXES`) to its number of ranks; outermost first."""
    names = mesh.mesh_dim_names or ("",)
    return {meaning: mesh.size(names.index(name)) for meaning, name in axis_names(mesh).items()}


def mesh_axes(mesh: DeviceMesh | MeshConfig | None) -> tuple[dict[str, int], str]:
    """Return axis sizes of one pipeline stage and device type, of a mesh, a mesh config, or this process."""
    if mesh is None:
        return {"shard": 1}, device_type()
    if isinstance(mesh, MeshConfig):
        sizes = mesh.sizes(mesh.num_ranks)
        device = mesh.device if mesh.device != "auto" else device_type()
    else:
        sizes, device = axis_sizes(mesh), mesh.device_type
    return {name: size for name, size in sizes.items() if name != "pipeline"}, device


_SHARED = {
    "pipeline": "stages of one model, for one batch",
    "replicate": "copies of the same shards, batches of their own",
    "shard": "shards of the same parameters, batches of their own",
    "expert": "experts of the same layers, batches of their own",
    "context": "parts of the same sequences",
    "tensor": "parts of the same matrix products, for one batch",
}
"""What the ranks along each axis share."""
_MAX_DRAWN = 4


def draw_mesh(mesh: DeviceMesh | MeshConfig) -> str:
    """Draw the rank groups along each axis of a mesh, and what they share; one line per axis.

    Args:
        mesh: A mesh from `init_distributed`, or a config with all sizes set, for ranks that do not exist yet.

    Ranks:
        Local. The same on every rank.
    """
    if isinstance(mesh, MeshConfig):
        sizes, device = mesh.sizes(mesh.num_ranks), mesh_axes(mesh)[1]
        ranks, places = torch.arange(mesh.num_ranks, device="cpu").view(*sizes.values()), list(sizes)
    else:
        sizes, device = axis_sizes(mesh), mesh.device_type
        ranks, meanings = mesh.mesh, {name: meaning for meaning, name in axis_names(mesh).items()}
        places = [meanings.get(name, "") for name in mesh.mesh_dim_names or ("",)]
    drawn = {axis: size for axis, size in sizes.items() if size > 1}
    count = f"{ranks.numel()} rank{'s' if ranks.numel() > 1 else ''}"
    lines = [f"{count}: {' x '.join(f'{axis} {size}' for axis, size in sizes.items())} ({device})"]
    for axis, size in drawn.items():
        groups = ranks.movedim(places.index(axis), -1).reshape(-1, size).tolist()
        texts = [" ".join(map(str, group)) if size <= 4 else f"{group[0]} {group[1]} … {group[-1]}" for group in groups]
        more = f" | … {len(groups)} groups" if len(groups) > _MAX_DRAWN else ""
        lines.append(f"  {axis:<{max(map(len, drawn))}}  {' | '.join(texts[:_MAX_DRAWN])}{more}: {_SHARED[axis]}")
    return "\n".join(lines)


_LATEST = "latest"
_EXIT_S = 0.2
_MESHES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, DeviceMesh]] = weakref.WeakKeyDictionary()
"""Meshes of each process group by device and sizes, and the latest one; each new mesh creates process groups."""


def init_distributed(config: MeshConfig | None = None, *, timeout_s: float = 600.0) -> DeviceMesh:
    """Initialize the process group and return the device mesh.

    Reads the launcher's environment variables; without a launcher this process is the only rank and needs
    neither environment variables nor a port. An existing process group is used unchanged.

    Args:
        config: The axes and the device; the default shards over all ranks, on an accelerator if available.
        timeout_s: Maximum time that a collective waits for the slowest rank.

    Returns:
        A mesh with the axis `shard` and all axes of more than one rank; `print(draw_mesh(mesh))` shows the ranks.

    Raises:
        ConfigError: The product of the axis sizes is not the number of ranks.
        EnvironmentProblem: The device is missing, two ranks share one, or the rendezvous fails.

    Ranks:
        Collective. Call on every rank, before anything is built.
    """
    mesh = make_mesh(config, timeout_s=timeout_s)
    _meshes()[_LATEST] = mesh
    return mesh


def make_mesh(config: MeshConfig | None = None, *, timeout_s: float = 600.0) -> DeviceMesh:
    """`init_distributed`, without setting the default mesh; collective."""
    config = config or MeshConfig()
    if dist.is_initialized():
        device_type = _device_of_group(config)
        sizes = config.sizes(dist.get_world_size())
    else:
        launch = read_launch()
        sizes = config.sizes(launch.world_size)
        device_type = _device_asked_for(config)
        _start_group(launch, device_type, timeout_s)
    return mesh_of_sizes(device_type, sizes)


def mesh_of_sizes(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """The mesh of all ranks with these axes; collective on the first call."""
    key = (device_type, *sizes.items())
    return made_once(key, lambda: init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


def made_once(key: object, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """Return the cached mesh for `key` in this process group, because every new mesh creates groups."""
    made = _meshes()
    if key not in made:
        made[key] = make()
    return made[key]


def widest_mesh(tensors: Iterable[torch.Tensor], *meshes: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh with most ranks, then most axes, of the DTensors and `meshes`; None without any.

    Under tensor parallelism the mesh of some parameters has only the data-parallel axes.
    """
    found = [mesh for mesh in meshes if mesh is not None]
    found += [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    return max(found, key=lambda mesh: (mesh.size(), mesh.ndim), default=None)


def default_mesh() -> DeviceMesh:
    """The mesh of the last `init_distributed`; else a new one over all ranks. Collective on the first call."""
    return latest_mesh() or init_distributed()


def sub_mesh(mesh: DeviceMesh, meanings: Iterable[str]) -> DeviceMesh | None:
    """Return the sub-mesh of the axes with one of `meanings`, in order; None without any."""
    wanted = set(meanings)
    names = tuple(name for meaning, name in axis_names(mesh).items() if meaning in wanted)
    if not names:
        return None
    return mesh if len(names) == mesh.ndim else mesh[names]


def model_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that share one model: all, or those of one pipeline stage."""
    return _present(sub_mesh(mesh, (meaning for meaning in AXES if meaning != "pipeline")))


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes along which ranks have different batches (`BATCH_AXES`)."""
    return _present(sub_mesh(mesh, BATCH_AXES))


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """Return this rank's index among ranks with different batches."""
    return _position(data_parallel_mesh(mesh))


def random_stream(mesh: DeviceMesh) -> int:
    """Return this rank's index among ranks with different tokens or layers, and so other random numbers."""
    return _position(_present(sub_mesh(mesh, (meaning for meaning in AXES if meaning != "tensor"))))


def _position(mesh: DeviceMesh) -> int:
    position = 0
    for axis in range(mesh.ndim):
        position = position * mesh.size(axis) + mesh.get_local_rank(axis)
    return position


def gradient_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes over which gradients of dense parameters are averaged (`GRADIENT_AXES`)."""
    return _present(sub_mesh(mesh, GRADIENT_AXES))


def fsdp_mesh(mesh: DeviceMesh, shard_axes: Iterable[str] = SHARD_AXES) -> DeviceMesh:
    """The mesh for `fully_shard`: the replicate axis, if any, and `shard_axes` as one axis; collective at first."""
    sharded = _present(sub_mesh(mesh, shard_axes))
    replicated = sub_mesh(mesh, ("replicate",))
    if sharded.ndim == 1:
        return sharded if replicated is None else _present(sub_mesh(mesh, ("replicate", *shard_axes)))
    flat = compat.flattened(sharded)
    return flat if replicated is None else compat.joined_meshes(replicated, flat)


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the tensor-parallel axis, or None."""
    return sub_mesh(mesh, ("tensor",))


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the expert-parallel axis, or None."""
    return sub_mesh(mesh, ("expert",))


def _present(mesh: DeviceMesh | None) -> DeviceMesh:
    assert mesh is not None, "a mesh has an axis that shards"
    return mesh


def ranks_per_machine() -> int | None:
    """Return the number of ranks per machine; None if it differs, or they are not consecutive. Collective."""
    launch = read_launch()
    is_launched = launch.world_size == dist.get_world_size()
    # The machine's first rank according to the launcher; without a launcher, its host name.
    machines = gather_objects(str(launch.rank - launch.local_rank) if is_launched else socket.gethostname())
    sizes = [len(list(ranks)) for _, ranks in groupby(machines)]
    return sizes[0] if len(set(sizes)) == 1 and len(sizes) == len(set(machines)) else None


def shutdown() -> None:
    """Destroy the process group and the default mesh, if any; collective, at the end of a script."""
    forget_meshes()
    if dist.is_initialized():
        dist.destroy_process_group()


def _device_asked_for(config: MeshConfig) -> str:
    """The device type to use in a new process group."""
    found = device_type()
    if config.device == "auto":
        return found
    if config.device not in ("cpu", found):
        raise EnvironmentProblem(
            f"mesh.device is {config.device}, but this process sees " + ("no accelerator" if found == "cpu" else found),
            where="mesh.device",
            why="every rank stores its shards on this device",
            fix=f"set mesh.device = {found}, or check the driver and the torch build for {config.device}",
        )
    return config.device


def _device_of_group(config: MeshConfig) -> str:
    """The device type to use with the existing process group."""
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    # gloo also lists cuda but cannot reduce-scatter on it.
    usable = [device for device, backend in backends.items() if device == "cpu" or backend != "gloo"]
    if config.device == "auto":
        wanted = _device_asked_for(config)
        return wanted if wanted in usable else usable[0]
    device_type = _device_asked_for(config)
    if device_type not in usable:
        raise EnvironmentProblem(
            f"mesh.device is {device_type}, but the process group was made for {', '.join(usable)}",
            where="mesh.device",
            why="an existing process group is used unchanged",
            fix=f'init_process_group("{_backends(device_type)}"), or let init_distributed create the group',
        )
    return device_type


def _start_group(launch: Launch, device_type: str, timeout_s: float) -> None:
    """Select the device and start the process group; raise on all ranks if devices are shared. Collective."""
    if device_type != "cpu":
        torch.accelerator.set_device_index(_device_index(launch, torch.accelerator.device_count()))
    try:
        dist.init_process_group(
            _backends(device_type),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
            init_method=launch.init_method,
            # A single rank needs no rendezvous: a store in memory, no port, and the same backends as a large run.
            store=None if launch.init_method else dist.HashStore(),
        )
    except dist.DistError as error:
        raise rendezvous_error(error, launch, timeout_s) from None
    if device_type == "cuda" and launch.world_size > 1:
        card = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        try:
            refuse_shared_cards(gather_objects(f"{socket.gethostname()} GPU {card}"))
        except EnvironmentProblem:
            dist.destroy_process_group()
            raise


def _backends(device_type: str) -> str:
    """Return the backends: the accelerator's, and gloo for CPU tensors (offloading, clipping, objects)."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def _device_index(launch: Launch, num_devices: int) -> int:
    """Return the index of this rank's device; a launcher may expose only one device to each rank."""
    if launch.local_rank < num_devices:
        return launch.local_rank
    if num_devices == 1:
        return 0
    raise EnvironmentProblem(
        f"local rank {launch.local_rank} has no device: {num_devices} are visible",
        where=f"rank {launch.rank}",
        why="each rank of a machine uses its own device",
        fix=f"start {num_devices} ranks on this machine, or set mesh.device = cpu",
    )


def refuse_shared_cards(cards: list[str]) -> None:
    """Raise if two ranks use the same GPU; NCCL would hang or fail without naming the cause."""
    for card in dict.fromkeys(cards):
        ranks = [rank for rank, other in enumerate(cards) if other == card]
        if len(ranks) > 1:
            raise EnvironmentProblem(
                f"ranks {ranks} are all on {card}",
                where=f"ranks {ranks}",
                why="NCCL needs a GPU for each rank",
                fix="start as many ranks as there are GPUs, or set mesh.device = cpu",
            )


def _meshes() -> dict[object, DeviceMesh]:
    world = dist.group.WORLD
    if world is None:
        return {}
    if world not in _MESHES:
        forget_meshes()  # meshes of a destroyed process group
        finish_collectives_at_exit()
    return _MESHES.setdefault(world, {})


def finish_collectives_at_exit() -> None:
    """Wait briefly at exit: a gloo thread that releases a tensor during interpreter shutdown aborts the process.

    It may do so after the collective has returned its result, and after `destroy_process_group()`.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and "gloo" in str(dist.get_backend_config()):
        atexit.unregister(_wait_for_threads)
        atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    time.sleep(_EXIT_S)


def latest_mesh() -> DeviceMesh | None:
    """Return the mesh of the last `init_distributed`, unless its process group was destroyed."""
    return _meshes().get(_LATEST)


def forget_meshes() -> None:
    """Clear all cached meshes and the default."""
    _MESHES.clear()
