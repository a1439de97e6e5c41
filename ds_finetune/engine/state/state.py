"""The state of a run under DeepSpeed as named slices of full tensors, which a checkpoint saves and restores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.patches.deepspeed_engine import link_optimizer_states
from ds_finetune.engine.patches.deepspeed_init import forget_second_copies
from ds_finetune.engine.state.full_tensors import named_parameters, partition, persistent_buffers
from ds_finetune.engine.state.parameter_tags import is_copy
from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import Fragment, in_memory
from ds_finetune.model.parallel.sharding import ModelShard, shape_in_model
from ds_finetune.plan.mesh import Axis
from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class Part:
    """A part of a parameter in an fp32 master tensor: elements `start` to `start + numel` of the flattened parameter
    `name` of `shape`. They begin at `offset` in the master tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int
    is_state: bool = False
    """Whether the elements are a complete optimizer state, which has another shape than the parameter."""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """View of these elements in the master tensor, or in an optimizer state of the master's size, 1-D."""
        return values.detach().view(-1)[self.offset : self.offset + self.numel]


@dataclass(frozen=True, eq=False)
class Master:
    """A master tensor: the fp32 tensor `flat` that the optimizer updates, its number, and the parts of parameters in
    it. A master on NVMe is empty until it is swapped in. Below stage 3, an optimizer state such as Muon's momentum has
    all elements of the master's parameters, not only those of this rank (zero/stage_1_and_2.py:2805). `full_parts` are
    the positions of the parameters in such a state. If a parameter is divided between the masters of two ranks, both
    have its full state.
    """

    flat: torch.Tensor
    parts: tuple[Part, ...]
    number: int
    is_swapped: bool = False
    full_parts: tuple[Part, ...] = ()
    is_parameter: bool = False
    """Whether the master is one full parameter, whose optimizer states may have any shape."""

    def parts_in(self, state: torch.Tensor, *, restoring: bool) -> tuple[Part, ...]:
        """The parts of parameters in `state`, an optimizer state of this master. For saving, only one
        rank returns an element of the state; with `restoring`, all ranks that have the element return it.
        """
        if state.numel() == self.flat.numel():
            return self.parts
        if self.is_parameter:
            return (replace(self.parts[0], shape=tuple(state.shape), numel=state.numel(), is_state=True),)
        if restoring:
            return self.full_parts
        begins = {part.name: part.offset for part in self.full_parts}
        return tuple(replace(part, offset=begins[part.name] + part.start) for part in self.parts)


def master_weights(wrapped: Any, plan: Plan) -> list[Master]:  # noqa: ANN401 - a DeepSpeedEngine
    """This rank's fp32 master tensors, each with the names of its parameters. Frozen parameters have no master."""
    names = {id(param): name for name, param in named_parameters(wrapped.module)}
    optimizer = wrapped.optimizer
    if plan.zero_stage == 3:
        return list(_masters_of_stage_3(optimizer, names, plan))
    if plan.zero_stage:
        return [_master_of_group(optimizer, number, names) for number in range(len(optimizer.bit16_groups))]
    if plan.precision == "fp32":
        trained = [param for group in optimizer.param_groups for param in group["params"]]
        return [Master(p, _full_parts([p], names), number, is_parameter=True) for number, p in enumerate(trained)]
    return list(_masters_of_stage_0(optimizer, names))


def _full_parts(params: Sequence[torch.Tensor], names: dict[int, str]) -> tuple[Part, ...]:
    pairs = zip(params, accumulate((param.numel() for param in params), initial=0), strict=False)
    return tuple(Part(names[id(p)], tuple(p.shape), 0, p.numel(), offset) for p, offset in pairs)


def _masters_of_stage_0(optimizer: Any, names: dict[int, str]) -> Iterator[Master]:  # noqa: ANN401
    """Masters at ZeRO stage 0 in 16 bits: of parameters (fp16/unfused_optimizer.py) or groups (fused_optimizer.py)."""
    if hasattr(optimizer, "fp32_groups"):
        params, masters = map(chain.from_iterable, (optimizer.fp16_groups, optimizer.fp32_groups))
        for number, (param, flat) in enumerate(zip(params, masters, strict=True)):
            yield Master(flat, _full_parts([param], names), number, is_parameter=True)
        return
    for number, (group, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        yield Master(flat, _full_parts(group, names), number)


def _master_of_group(optimizer: Any, number: int, names: dict[int, str]) -> Master:  # noqa: ANN401
    """Master tensor at ZeRO stages 1 and 2: part of a group's flat parameters (utils/mixed_precision_linkage.py)."""
    parts = []
    for param in optimizer.bit16_groups[number]:
        mapping = param._hp_mapping
        if mapping is not None:
            where = mapping.lp_fragment_address
            parts.append(
                Part(names[id(param)], tuple(param.shape), where.start, where.numel, mapping.hp_fragment_address.start)
            )
    full_parts = _full_parts(optimizer.params_in_partition[number], names)
    return Master(optimizer.single_partition_of_fp32_groups[number], tuple(parts), number, full_parts=full_parts)


def _masters_of_stage_3(optimizer: Any, names: dict[int, str], plan: Plan) -> Iterator[Master]:  # noqa: ANN401
    """Master tensors at ZeRO stage 3: flat pieces of all parameters, in sub-groups (zero/stage3.py, grad_position)."""
    for number, group in enumerate(optimizer.fp16_groups):
        parts = []
        for param in group:
            _, offset, num_held = optimizer.grad_position[optimizer.get_param_id(param)]
            start = min(optimizer._get_param_partition_rank(param) * num_held, param.ds_numel)
            parts.append(
                Part(names[id(param)], tuple(param.ds_shape), start, min(num_held, param.ds_numel - start), offset)
            )
        is_swapped = plan.offload_optimizer == "nvme" and optimizer._swappable_optimizer_subgroup(number)
        yield Master(
            optimizer.fp32_partitioned_groups_flat[number],
            tuple(part for part in parts if part.numel),
            number,
            is_swapped,
        )


WEIGHT, BUFFER = "weight", "buffer"
_MUON = "momentum_buffer"
_SAME_KIND = {"sum": "exp_avg_sq"}
"""DeepSpeed's name for an optimizer state that torch names differently, in Adagrad."""
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of a dynamic loss scale (DeepSpeed 0.19.8, fp16/loss_scaler.py:74, 193)."""


@dataclass(frozen=True)
class Slice:
    """A slice of the state: elements `start` to `start + numel` of a row-major local tensor.

    The local tensor is a box of the global tensor, which has the shape `shape`; the box begins at index `origin`.
    Without tensor parallelism it is the global tensor. `key` is `kind/name` and does not depend on the layout, such as
    `weight/model.norm.weight`, `exp_avg/...`, `buffer/...`. If `is_replicated`, every rank has equal elements. A fused
    `gate_up_proj` has the shape [experts, 2, inner, hidden], in which a tensor parallel shard is one box.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    numel: int
    dtype: torch.dtype
    is_replicated: bool = False
    origin: tuple[int, ...] | None = None
    local_shape: tuple[int, ...] | None = None


Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class StateGroup:
    """Slices that are in memory at one time. The context `opened(write)` gives a function from a slice's key to its
    elements; with `write`, slices on NVMe are written back.
    """

    slices: tuple[Slice, ...]
    opened: Callable[[bool], AbstractContextManager[Read]]


class EngineState:
    """The state of one rank: weights, optimizer states, persistent buffers and counters."""

    def __init__(self, wrapped: Any, plan: Plan, same_shard: dist.ProcessGroup | None) -> None:  # noqa: ANN401 - a DeepSpeedEngine
        self._ds, self._plan, self._same_part = wrapped, plan, same_shard
        self._model_shard = ModelShard.of(plan.mesh, family_of(wrapped.module.lm.config.model_type))
        self._masters = master_weights(wrapped, plan)
        self._copies = {name for name, param in named_parameters(wrapped.module) if is_copy(param)}
        # With an offload ratio below 1, some sub-groups have a second optimizer (zero/stage3.py:1253).
        backup = getattr(wrapped.optimizer, "backup_optimizer", None)
        base = wrapped.optimizer if plan.is_engine_clipping else wrapped.optimizer.optimizer
        self._optimizers = [base, *([backup] if backup is not None else [])]

    def groups(self, *, restoring: bool = False, home: Sequence[int] = ()) -> list[StateGroup]:
        """All slices of this rank's state, weights before optimizer states. A sub-group on NVMe is a group of its own.
        The ranks `home` (empty: all), which save to one folder, together have each element of the state in their
        slices. With `restoring`, the slices have all elements that this rank needs, also those that others save.
        """
        self._home = frozenset(home or range(self._plan.mesh.world_size))
        if self._plan.device == "cuda":
            torch.cuda.synchronize()
        swapped = [[master] for master in self._masters if master.is_swapped]
        in_memory = [master for master in self._masters if not master.is_swapped]
        trained = [self._group(masters, restoring) for masters in [in_memory, *swapped] if masters]
        return [*trained, *self._frozen(restoring), self._buffers(restoring)]

    def scalars(self) -> dict[str, Any]:
        """The loss scale and the number of optimizer steps, as plain numbers; collective with pipeline stages. `steps`
        is the number of steps taken. At ZeRO stage 0, `steps_of` has the numbers for parameters that took fewer steps.
        Each pipeline stage knows them for its own parameters only, so they are gathered.
        """
        steps_of = {part.name: self._steps(master) for master in self._masters for part in master.parts}
        if self._plan.mesh.pp > 1:
            steps_of = {name: steps for of_stage in all_gather_object(steps_of) for name, steps in of_stage.items()}
        common = max(steps_of.values(), default=0)
        fewer = {name: steps for name, steps in steps_of.items() if steps != common}
        return {
            "steps": common,
            # DeepSpeed's fused kernels count only in a group's last parameter (ops/adam/fused_adam.py), so counts of
            # other parameters are not saved.
            "steps_of": {} if type(self._optimizers[0]).__module__.startswith("deepspeed.") else fewer,
            "loss_scale": loss_scale(scaler_of(self._ds.optimizer)) if self._plan.precision == "fp16" else {},
        }

    def create_optimizer_state(self, kinds_of: Mapping[str, set[str]]) -> None:
        """Create missing optimizer states by a step with zero gradients and learning rate zero. `kinds_of` has the
        kinds of states that are needed, by parameter name.
        """
        missing_kinds = {
            master: {kind for part in master.parts for kind in kinds_of.get(part.name, ())} for master in self._masters
        }
        fresh = [master for master, kinds in missing_kinds.items() if kinds]
        if not fresh:
            return
        with _learning_rate_zero(self._optimizers):
            for masters in [[master] for master in fresh] if self._plan.zero_stage == 3 else [fresh]:
                self._zero_step(masters)
        for master in fresh:
            for kind in missing_kinds[master] - self._kinds(master).keys():
                # Below stage 3 a step with zero gradients creates no momentum for Muon, so it is created here: for the
                # full parameters, or for this rank's partition of them if the optimizer is offloaded.
                is_whole = kind == _MUON and master.full_parts and self._plan.offload_optimizer == "none"
                size = sum(part.numel for part in master.full_parts) if is_whole else master.flat.numel()
                self._optimizers[0].state[master.flat][kind] = torch.zeros(size, device=master.flat.device)

    def finish(self, scalars: Mapping[str, Any]) -> None:
        """Finish a restore: set step counts and loss scale to `scalars`, and weights to the restored master weights."""
        for master in self._masters:
            steps_of = (scalars["steps_of"].get(part.name, scalars["steps"]) for part in master.parts)
            state, steps = self._state(master), max(steps_of, default=scalars["steps"])
            if torch.is_tensor(state.get("step")):
                state["step"].fill_(steps)
            elif "step" in state:
                state["step"] = steps
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            if "step" in group:
                group["step"] = scalars["steps"]
        if self._plan.precision == "fp16":
            restore_loss_scale(scaler_of(self._ds.optimizer), scalars["loss_scale"])
        self._update_model_weights()
        self.update_fp32()
        self._ds.module.in_fp32.round_into_parameters()

    def store_fp32(self) -> None:
        """Copy the fp32 values of weights in `in_fp32` to master weights, which DeepSpeed made from 16-bit values."""
        values = self._ds.module.in_fp32.values
        for part, flat in self._parts_in_fp32():
            flat.copy_(values[part.name].view(-1)[part.start : part.start + part.numel])

    def update_fp32(self) -> None:
        """Copy master weights to the fp32 values with which forwards compute; collective among ranks of one shard."""
        in_fp32 = self._ds.module.in_fp32
        trained = [name for name, param in in_fp32.params.items() if param.requires_grad]
        if not trained:
            return
        sizes = [in_fp32.values[name].numel() for name in trained]
        flat_values = torch.zeros(sum(sizes), device=self._ds.device)
        flat_of = dict(zip(trained, flat_values.split(sizes), strict=True))
        for part, flat in self._parts_in_fp32():
            flat_of[part.name][part.start : part.start + part.numel] = flat
        if self._plan.zero_stage:
            # The sum over ranks acts as a gather: each element is set on one rank, and zero on the others.
            dist.all_reduce(flat_values, group=self._same_part)
        for name, flat in flat_of.items():
            in_fp32.values[name].view(-1).copy_(flat)

    def _parts_in_fp32(self) -> Iterator[tuple[Part, torch.Tensor]]:
        names = self._ds.module.in_fp32.params
        for master in self._masters:
            for part in master.parts:
                if part.name in names:
                    yield part, part.of(master.flat)

    def first_moment(self, param: nn.Parameter) -> torch.Tensor:
        """Adam's first moment of a full parameter, fp32; collective among ranks that share the parameter."""
        from deepspeed.utils import safe_get_full_optimizer_state

        optimizer, stage = self._ds.optimizer, self._plan.zero_stage
        if not stage:
            return self._optimizers[0].state[param]["exp_avg"].detach().float()
        if stage < 3:
            link_optimizer_states(optimizer)
        return safe_get_full_optimizer_state(param, "exp_avg").detach().float()

    def _state(self, master: Master) -> dict[str, Any]:
        states = [optimizer.state[master.flat] for optimizer in self._optimizers if master.flat in optimizer.state]
        return states[0] if states else {}

    def _kinds(self, master: Master) -> dict[str, torch.Tensor]:
        """A master tensor's optimizer states by kind, such as `exp_avg`; empty while the master is on NVMe."""
        sizes = (master.flat.numel(), sum(part.numel for part in master.full_parts))
        tensors = {
            kind: value for kind, value in self._state(master).items() if torch.is_tensor(value) and kind != "step"
        }
        return {
            _SAME_KIND.get(kind, kind): value
            for kind, value in tensors.items()
            if master.is_parameter or value.numel() in sizes
        }

    def _group(self, masters: Sequence[Master], restoring: bool) -> StateGroup:
        tensors = [(WEIGHT, master, master.flat) for master in masters]
        kinds = {master: self._kinds(master) for master in masters}
        for kind in sorted({kind for kinds_of_master in kinds.values() for kind in kinds_of_master}):
            tensors += [(kind, master, kinds[master][kind]) for master in masters if kind in kinds[master]]
        sources = {
            f"{kind}/{part.name}": (kind, master, part)
            for kind, master, value in tensors
            for part in master.parts_in(value, restoring=restoring)
        }
        dtypes = {(kind, master): value.dtype for kind, master, value in tensors}
        all_slices = [self._slice(key, part, dtypes[kind, master]) for key, (kind, master, part) in sources.items()]
        slices = [part for part in all_slices if restoring or self._is_saved_here(part)]

        def read(key: str) -> torch.Tensor:
            kind, master, part = sources[key]
            return part.of(master.flat if kind == WEIGHT else self._kinds(master)[kind])

        return StateGroup(tuple(slices), lambda write: self._open_masters(masters, read, write))

    def _slice(self, key: str, part: Part, dtype: torch.dtype) -> Slice:
        if part.is_state:
            # A state's shape differs from its parameter's only if every rank trains full parameters and has all states.
            return Slice(key, part.shape, 0, part.numel, dtype, is_replicated=True)
        shard = self._model_shard.tensor_shard(part.name, part.shape)
        is_replicated = self._plan.zero_stage == 0 and shard.is_full and self._plan.mesh.pp == 1
        return Slice(
            key, shard.global_shape, part.start, part.numel, dtype, is_replicated, shard.offsets, shard.local_shape
        )

    def _is_saved_here(self, part: Slice) -> bool:
        """Whether this rank saves a slice that several ranks have, because of ZeRO stage 0 or tensor parallelism."""
        name = part.key.partition("/")[2]
        if part.is_replicated:
            return True
        if name in self._copies:
            return False
        shard = self._model_shard.tensor_shard(name, shape_in_model(part.local_shape or part.shape))
        of_shards: tuple[Axis, ...] = ("tp",) if shard.dim is None else ()
        of_rows: tuple[Axis, ...] = ("dp", "sp") if self._plan.zero_stage == 0 else ()
        return self._is_first_here(*of_shards, *of_rows, same_experts=shard.is_expert_parallel)

    def _is_first_here(self, *axes: Axis, same_experts: bool = False) -> bool:
        """Whether this rank is the first among those ranks of `home` (see `groups`) that have the same elements. These
        ranks differ only along `axes` of the mesh and, with `same_experts`, have the same experts.
        """
        mesh = self._plan.mesh
        line = next(line for line in mesh.groups(*axes) if mesh.rank in line)
        holders = [rank for rank in line if not same_experts or mesh.expert_index_of(rank) == mesh.expert_index]
        return min(self._home.intersection(holders)) == mesh.rank

    def _buffers(self, restoring: bool) -> StateGroup:
        mesh, buffers = self._plan.mesh, dict(persistent_buffers(self._ds.module))
        is_saved = restoring or mesh.pp == 1 or self._is_first_here("dp", "sp", "tp")
        slices = [
            Slice(f"{BUFFER}/{name}", tuple(buffer.shape), 0, buffer.numel(), buffer.dtype, is_replicated=mesh.pp == 1)
            for name, buffer in (buffers if is_saved else {}).items()
        ]
        return StateGroup(
            tuple(slices), lambda write: nullcontext(lambda key: buffers[key.partition("/")[2]].detach().view(-1))
        )

    def _frozen(self, restoring: bool) -> Iterator[StateGroup]:
        """The frozen weights that checkpoints save, as groups of slices. With LoRA the base weights are not saved."""
        mesh, stage = self._plan.mesh, self._plan.zero_stage
        is_replicated = stage < 3 and mesh.pp == 1
        # Below ZeRO stage 3, all ranks of a pipeline stage have all elements of a frozen weight; at stage 3, only
        # tensor parallel ranks share them.
        of_rows: tuple[Axis, ...] = () if stage == 3 else ("dp", "sp")
        is_saved = restoring or is_replicated or self._is_first_here(*of_rows, "tp")
        params = [(name, param) for name, param in self._ds.module.lm.named_parameters() if name in self._plan.frozen]
        for name, param in params if is_saved else ():
            fragment, value = partition(param), self._ds.module.in_fp32.values.get(name)
            if value is not None:
                # Every rank has the full fp32 value: it saves its own part of it, but restores all of it.
                start, end = (0, value.numel()) if restoring else (fragment.start, fragment.end)
                fragment = in_memory(value.view(-1)[start:end], start=start, shape=fragment.shape)
            numel = fragment.end - fragment.start
            if numel > 0:
                dtype = param.dtype if value is None else torch.float32
                part = Slice(
                    f"{WEIGHT}/{name}", fragment.shape, fragment.start, numel, dtype, is_replicated=is_replicated
                )
                yield StateGroup((part,), partial(_open_fragment, fragment, numel))

    @contextmanager
    def _open_masters(self, masters: Sequence[Master], read: Read, write: bool) -> Iterator[Read]:
        if not masters[0].is_swapped:
            yield read
            return
        with self._swap_in(masters[0], write):
            yield read
            if write:
                # 16-bit parameters, which may be on NVMe, are updated from the master while it is in memory.
                self._ds.optimizer._reassign_or_swap_out_partitioned_parameters(masters[0].number)

    @contextmanager
    def _swap_in(self, master: Master, write: bool) -> Iterator[None]:
        optimizer = self._ds.optimizer
        optimizer._optimizer_states_and_gradient_swap_in(master.number)
        try:
            yield
        finally:
            if write:
                optimizer._optimizer_states_and_gradient_swap_out(master.number)
            else:
                optimizer._release_swap_buffers(master.number)

    def _zero_step(self, masters: Sequence[Master]) -> None:
        """Take one optimizer step with zero gradients on `masters`; at stage 3, they are of one sub-group."""
        with self._swap_in(masters[0], write=True) if masters[0].is_swapped else nullcontext():
            grads = [master.flat.grad for master in masters]
            for master in masters:
                master.flat.grad = torch.zeros_like(master.flat)
            if self._plan.zero_stage == 3:
                self._ds.optimizer._optimizer_step(masters[0].number)
            else:
                self._optimizers[0].step()
            for master, grad in zip(masters, grads, strict=True):
                master.flat.grad = grad

    def _steps(self, master: Master) -> int:
        steps = self._state(master).get("step")
        shared = max((int(group["step"]) for group in self._optimizers[0].param_groups if "step" in group), default=0)
        return shared if steps is None else int(steps)

    def _update_model_weights(self) -> None:
        optimizer, stage = self._ds.optimizer, self._plan.zero_stage
        if stage == 3:
            forget_second_copies(self._ds.module)
            for master in self._masters:
                if not master.is_swapped:
                    optimizer._reassign_or_swap_out_partitioned_parameters(master.number)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        elif stage:
            optimizer.update_lp_params()
        elif not self._plan.is_engine_clipping:
            params = dict(named_parameters(self._ds.module))
            for master in self._masters:
                for part in master.parts:
                    params[part.name].data.view(-1).copy_(part.of(master.flat))


def scaler_of(optimizer: Any) -> Any:  # noqa: ANN401 - one of DeepSpeed's wrappers
    """The object that has the loss scale of DeepSpeed's optimizer. It is `loss_scale_config` at stage 0
    (fp16/fused_optimizer.py, unfused_optimizer.py), else `loss_scaler`.
    """
    return getattr(optimizer, "loss_scale_config", None) or optimizer.loss_scaler


def loss_scale(scaler: Any) -> dict[str, Any]:  # noqa: ANN401
    """The values of a dynamic loss scale; empty for a constant one from the run file."""
    is_dynamic = getattr(scaler, "dynamic_loss_scale", getattr(scaler, "dynamic", False))
    return {name: getattr(scaler, name) for name in _SCALER if hasattr(scaler, name)} if is_dynamic else {}


def restore_loss_scale(scaler: Any, saved: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Set a dynamic loss scale to `saved`, the result of `loss_scale`. Values that the scaler lacks are ignored."""
    for name in loss_scale(scaler).keys() & saved.keys():
        setattr(scaler, name, saved[name])


@contextmanager
def _open_fragment(fragment: Fragment, numel: int, write: bool) -> Iterator[Read]:
    with fragment.opened() as elements:
        yield lambda key: elements.detach()[:numel]


@contextmanager
def _learning_rate_zero(optimizers: Sequence[Any]) -> Iterator[None]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, lr in zip(groups, rates, strict=True):
            group["lr"] = lr
