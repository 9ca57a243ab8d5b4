# SPDX-License-Identifier: Apache-2.0
"""One pipeline stage: weights, optimizer state, autograd graphs, and the sums of a step.

Forwards and backwards are pure functions of the weights and their inputs. A microbatch's gradient
is computed on its own and added once, in fixed point, so neither order nor placement shows in
the result. Used by one thread; knows nothing of the network.

With a learned codec the stage begins and ends with halves of it, and what goes in and out is
narrow. A parameter that both sides of a boundary hold is *mirrored*: each stage sums its own share
of the gradient; before a step is prepared, each adds the other's share to its totals, and then
both take the same update.

Shapes: B sequences, T positions, D width, V vocabulary, R values per token on the wire (D without
a learned codec).
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from shoal.compression.learned.build import build_halves
from shoal.node.digest import tensor_digest
from shoal.node.fixed_point import Accumulator, combine, largest, squared_norms
from shoal.node.model.loss import summed_loss
from shoal.node.model.transformer import build_stage_model
from shoal.node.stage_state import StageState, check_shape
from shoal.protocol.costs import boundary_shape
from shoal.protocol.errors import (
    NonFiniteError,
    NonFiniteLossError,
    ProtocolError,
    WrongLeaseError,
    WrongStepError,
)
from shoal.protocol.learned import learned_codec
from shoal.protocol.spec import ResolvedRun
from shoal.protocol.tensors import mirrored_tensors
from shoal.protocol.update_rules import KINDS

ComputeDtype = Literal["fp32", "bf16", "fp16"]

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_EXPONENT = 256  # far beyond any sensible scale, far within fp64


@dataclass(slots=True)
class _InFlight:
    """A microbatch between forward and backward. Without `output`, `x` alone brings it back."""

    x: Tensor
    tokens_BT: Tensor | None
    output: Tensor | None


class StageRuntime:
    """A stage of a run on a device.

    `weights`, `exp_avg` and `exp_avg_sq` are the live fp32 tensors by global name, in canonical
    order (`names`, `numels`); callers read them. Not every update rule keeps both moments. `step`
    counts the committed steps they contain.
    """

    def __init__(
        self,
        run: ResolvedRun,
        stage: int,
        *,
        device: torch.device,
        compute_dtype: ComputeDtype,
        recompute: bool = False,
    ) -> None:
        """All state is zero, at step 0, until `initialise` or `load_state`.

        On CUDA this asks the whole process for deterministic kernels; cuBLAS also wants
        CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment.
        """
        if device.type == "cuda":
            # Attention's backward otherwise adds in the order in which its blocks finish.
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Not needed for that, and a pass over every new tensor. The stubs don't know it.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.run = run
        self.spec = run.stage(stage)
        self.device = device
        self.compute_dtype = compute_dtype
        self.max_graphs = 0 if recompute else sys.maxsize
        """Autograd graphs kept at most between forward and backward; the rest is recomputed, to
        the same bits. May change at any time."""
        self.step = 0
        self.accumulated: set[int] = set()
        """Microbatches whose gradient is in `sums`."""
        self.poisoned = False
        """The next gradient shall be NaN: a fault on order (protocol/faults.py)."""

        spec = run.spec
        learned = learned_codec(spec.pipeline.boundary)
        self._width = boundary_shape(spec)[-1]
        halves = build_halves(learned, spec.model, self.spec, seed=spec.seed, device=device)
        self._needs_tokens = halves.side is not None and not self.spec.is_first
        self._model = build_stage_model(spec.model, self.spec, device=device, halves=halves)
        self._state = StageState(run, self.spec, self._model, halves.constraint)
        self.weights = self._state.weights
        self.exp_avg, self.exp_avg_sq = self._state.exp_avg, self._state.exp_avg_sq
        self.names, self.numels = self._state.names, self._state.numels
        mirrored = mirrored_tensors(self.spec, learned)
        self._foreign = mirrored.get(self.spec.stage - 1)
        """What the stage before this one reports the norm of."""
        self.mirrored = self._slices(mirrored)
        """By boundary, which part of `sums` belongs to a parameter that the stage on the other side
        holds too."""
        self._accumulator = Accumulator(
            self.numels,
            # A mirrored parameter sums up the microbatches of two stages.
            max_terms=spec.batch.microbatches * (2 if self.mirrored else 1),
            device=device,
        )
        self._in_flight: dict[int, _InFlight] = {}
        self._scale_exponent = 0
        self._loss_scale = 1.0

    # ---- state ---------------------------------------------------------------------------

    def initialise(self) -> None:
        """The state at step 0: a function of the run's seed and the tensors' names."""
        self._state.initialise()
        self._restart(step=0)

    def load_state(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Copy a state in: what `state_tensors` gave after `step` committed steps.

        Raises `WrongShapeError` for missing or unknown names and for other shapes or dtypes, and
        then changes nothing.
        """
        self._state.load(tensors, KINDS)
        self._restart(step=step)

    def load_weights(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """The weights after `step` committed steps; the moments stay as they are. Raises as
        `load_state`."""
        self._state.load(tensors, ("weights",))
        self._restart(step=step)

    def load_moments(self, tensors: Mapping[str, Tensor]) -> None:
        """Both moments, of any step; the weights stay as they are. Raises as `load_state`."""
        self._state.load(tensors, ("exp_avg", "exp_avg_sq"))

    def state_tensors(self, kinds: Sequence[str] = KINDS) -> dict[str, Tensor]:
        """CPU copies, keyed "weights/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME"."""
        return {
            key: t.to("cpu", copy=True)
            for key, t in self._state.tensors().items()
            if key.partition("/")[0] in kinds
        }

    def weights_digest(self) -> int:
        return self._state.digest()

    @property
    def memory(self) -> int:
        """Bytes of weights, moments and sums; graphs in flight come on top."""
        return self._state.memory + self.sums.nbytes

    # ---- a step's microbatches -----------------------------------------------------------

    def begin_step(self, step: int, scale_exponent: int, loss_scale: float) -> None:
        """Open `step`, or open it again: sums, `accumulated` and microbatches in flight go.

        Raises `WrongStepError` unless `step` follows the state, and `ProtocolError` for a scale
        out of bounds; `loss_scale` is a power of two.
        """
        self._check_step(step)
        mantissa, exponent = math.frexp(loss_scale) if math.isfinite(loss_scale) else (0.0, 0)
        if mantissa != 0.5 or max(abs(scale_exponent), abs(exponent)) > _MAX_EXPONENT:
            raise ProtocolError(
                f"step {step}: loss_scale = {loss_scale} must be a power of two, and it and "
                f"2^scale_exponent = 2^{scale_exponent} within 2^±{_MAX_EXPONENT}"
            )
        self._scale_exponent = scale_exponent
        self._loss_scale = loss_scale
        self._restart(step=self.step)

    def forward(self, microbatch: int, x: Tensor, tokens_BT: Tensor | None = None) -> Tensor:
        """`hidden_BTR` fp32 for the next stage; not for the last stage. Keeps what the backward
        needs. May be repeated. Raises `NonFiniteError` for what must not be sent on.

        `tokens_BT` is needed, here and below, where `costs.reads_token_ids` says so and the stage
        isn't the first, whose input they are.
        """
        assert not self.spec.is_last, "the last stage's forward ends in the loss"
        x, tokens_BT = self._own_input(x), self._own_tokens(x, tokens_BT)
        output = self._compute(x, tokens_BT)
        hidden_BTR = output.detach()
        _check_finite(f"activation of microbatch {microbatch}", hidden_BTR)
        self._in_flight.pop(microbatch, None)
        kept = sum(entry.output is not None for entry in self._in_flight.values())
        graph = output if kept < self.max_graphs else None
        self._in_flight[microbatch] = _InFlight(x, tokens_BT, graph)
        return hidden_BTR

    def backward(self, microbatch: int, grad_BTR: Tensor) -> Tensor | None:
        """Gradient of the (scaled) summed loss by the stage's input, None on the first stage.

        Adds the weights' gradient into `sums`, unless `accumulated` says that it is there. On
        `NonFiniteError` or `NumericOverflowError` nothing was added, and the call may be repeated.
        Raises `WrongLeaseError` without a forward, `WrongShapeError` for another shape.
        """
        entry = self._in_flight.get(microbatch)
        if entry is None:
            raise WrongLeaseError(
                f"gradient of microbatch {microbatch}, whose forward stage {self.spec.stage} "
                "has not run here; send its input first"
            )
        x, output = entry.x, entry.output
        shape = (*x.shape[:2], self._width)
        check_shape(f"gradient of microbatch {microbatch}", grad_BTR, shape, torch.float32)
        entry.output = None  # autograd frees the graph; a repetition starts from the input
        if output is None:
            output = self._compute(x, entry.tokens_BT)
        input_gradient = self._differentiate(microbatch, x, output, grad_BTR.to(self.device))
        del self._in_flight[microbatch]
        return input_gradient

    def forward_backward_loss(
        self, microbatch: int, x: Tensor, targets_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> tuple[float, Tensor | None]:
        """The last stage's whole work: the summed loss in nats, unscaled, and the gradient of the
        scaled loss by the input (None where one stage is all). Adds and raises as `backward`."""
        x = self._own_input(x)
        loss = self._loss(x, targets_BT, self._own_tokens(x, tokens_BT))
        loss_sum = loss.item()
        if not math.isfinite(loss_sum):
            raise NonFiniteLossError(f"loss of microbatch {microbatch} is {loss_sum}")
        return loss_sum, self._differentiate(microbatch, x, loss * self._loss_scale, None)

    @torch.no_grad()
    def evaluate(self, x: Tensor, tokens_BT: Tensor | None = None) -> Tensor:
        """`hidden_BTR` fp32, with nothing kept. Raises `NonFiniteError`."""
        with self._autocast():
            hidden_BTR: Tensor = self._model(x.to(self.device), self._own_tokens(x, tokens_BT))
        _check_finite("activation of a validation microbatch", hidden_BTR)
        return hidden_BTR

    @torch.no_grad()
    def evaluate_loss(
        self, x: Tensor, targets_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> float:
        """The last stage's summed loss in nats, with nothing kept. Raises `NonFiniteLossError`."""
        tokens_BT = self._own_tokens(x, tokens_BT)
        loss_sum = self._loss(x.to(self.device), targets_BT, tokens_BT).item()
        if not math.isfinite(loss_sum):
            raise NonFiniteLossError(f"loss of a validation microbatch is {loss_sum}")
        return loss_sum

    def drop(self, microbatch: int) -> None:
        """Forget a forward whose backward isn't coming. Its gradient, if added, stays."""
        self._in_flight.pop(microbatch, None)

    # ---- the step's end ------------------------------------------------------------------

    @property
    def sums(self) -> Tensor:
        """The live flat int64 sums, in tensor order. For reading: a reduction that breaks off
        must find them unmodified."""
        return self._accumulator.sums

    def sums_digest(self, totals: Tensor) -> int:
        return tensor_digest(totals)

    def share(self, totals: Tensor, boundary: int) -> Tensor:
        """This stage's share of the gradient of what `boundary`'s two stages mirror: flat int64,
        for the stage on the other side."""
        self._check_totals(totals)
        return totals[self.mirrored[boundary]].clone()

    def add_shares(self, totals: Tensor, shares: Mapping[int, Tensor]) -> Tensor:
        """Totals with the other side's share of every mirrored parameter, by boundary: what is
        prepared and applied. A new tensor; `totals` stays as it is.

        Raises `WrongLeaseError` unless the shares are exactly those of this stage's boundaries,
        `WrongShapeError`, and `NumericOverflowError` where no honest share makes one.
        """
        self._check_totals(totals)
        if shares.keys() != self.mirrored.keys():
            raise WrongLeaseError(
                f"stage {self.spec.stage} mirrors parameters of boundaries "
                f"{sorted(self.mirrored)}; shares came of {sorted(shares)}"
            )
        whole = totals.clone()
        for boundary, share in shares.items():
            part = whole[self.mirrored[boundary]]
            part.copy_(combine([part, share.to(part.device)]))
        return whole

    def squared_norms(self, totals: Tensor, num_tokens: int) -> list[float]:
        """Squared norm of each tensor's gradient of the mean loss, at the open step's scale. What
        is mirrored counts once in the run: the stage after the boundary leaves it out."""
        self._check_totals(totals)
        norms = squared_norms(totals, self.numels, self._scale_exponent, num_tokens)
        named = zip(self.names, norms, strict=True)
        return [norm for name, norm in named if name != self._foreign]

    @torch.no_grad()
    def apply(
        self,
        totals: Tensor,
        *,
        step: int,
        num_tokens: int,
        learning_rate: float,
        clip_scale: float,
        scale_exponent: int,
    ) -> None:
        """Commit `step`: update weights and moments in place from all replicas' `totals`.

        Raises `WrongStepError` or `WrongShapeError` before anything changes. After any other
        exception the state is torn and must be loaded again.
        """
        self._check_step(step)
        self._check_totals(totals)
        self._in_flight.clear()  # their graphs refer to the old weights
        self._state.update(
            totals,
            step=step,
            num_tokens=num_tokens,
            learning_rate=learning_rate,
            clip_scale=clip_scale,
            scale_exponent=scale_exponent,
        )
        self.step = step

    def projections(self) -> dict[str, Tensor]:
        """CPU copies of the weights that `advance_moments` needs besides a step's totals, as they
        are before the step. Small, and mostly none."""
        return self._state.projections()

    @torch.no_grad()
    def advance_moments(
        self,
        totals: Tensor,
        *,
        num_tokens: int,
        clip_scale: float,
        scale_exponent: int,
        projections: Mapping[str, Tensor] | None = None,
    ) -> None:
        """What `apply` does to the moments, to the same bits; the weights stay as they are. The
        caller knows of which step the moments are, and gives the `projections` of the weights
        before it. Raises `WrongShapeError`."""
        self._check_totals(totals)
        self._state.advance_moments(
            totals,
            num_tokens=num_tokens,
            clip_scale=clip_scale,
            scale_exponent=scale_exponent,
            projections=projections or {},
        )

    # ---- inside --------------------------------------------------------------------------

    def _restart(self, *, step: int) -> None:
        self.step = step
        self.accumulated.clear()
        self._in_flight.clear()
        self._accumulator.clear()

    def _slices(self, mirrored: Mapping[int, str]) -> dict[int, slice]:
        starts = dict(zip(self.names, accumulate(self.numels, initial=0), strict=False))
        return {
            boundary: slice(starts[name], starts[name] + self.weights[name].numel())
            for boundary, name in mirrored.items()
        }

    def _own_input(self, x: Tensor) -> Tensor:
        """Checked, on the device, and a leaf of its own graph where it has a gradient."""
        model = self.run.spec.model
        if self.spec.is_first:
            check_shape("tokens", x, (*x.shape[:1], model.seq_len), torch.int64)
            return x.to(self.device)
        check_shape("hidden", x, (*x.shape[:1], model.seq_len, self._width), torch.float32)
        return x.detach().to(self.device).requires_grad_()

    def _own_tokens(self, x: Tensor, tokens_BT: Tensor | None) -> Tensor | None:
        """Checked and on the device, None where the halves need no ids or the input is they."""
        if not self._needs_tokens:
            return None
        assert tokens_BT is not None, "every stage of this run reads token ids"
        check_shape("tokens", tokens_BT, x.shape[:2], torch.int64)
        return tokens_BT.to(self.device)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        dtype = _TORCH_DTYPES[self.compute_dtype]
        enabled = dtype != torch.float32
        with torch.autocast(self.device.type, dtype if enabled else None, enabled=enabled):
            yield

    def _compute(self, x: Tensor, tokens_BT: Tensor | None) -> Tensor:
        # Always with a graph, also where it is dropped at once: attention picks its kernel by
        # whether a gradient is wanted, and both ways must give the same bits.
        with torch.enable_grad(), self._autocast():
            output: Tensor = self._model(x, tokens_BT)
        return output

    def _loss(self, x: Tensor, targets_BT: Tensor, tokens_BT: Tensor | None) -> Tensor:
        assert self.spec.is_last, "only the last stage has a loss"
        check_shape("targets", targets_BT, x.shape[:2], torch.int64)
        with self._autocast():
            logits_BTV = self._model(x, tokens_BT)
        return summed_loss(logits_BTV, targets_BT.to(self.device))

    def _differentiate(
        self, microbatch: int, x: Tensor, output: Tensor, grad_output: Tensor | None
    ) -> Tensor | None:
        parameters = self._state.parameters
        wanted = parameters if self.spec.is_first else [*parameters, x]
        # Zeros for what this side has no share in: a projection whose sender alone learns it.
        gradients = list(torch.autograd.grad(output, wanted, grad_output, materialize_grads=True))
        if self.poisoned:
            self.poisoned = False
            gradients[0] = torch.full_like(gradients[0], math.nan)
        input_gradient = None
        if not self.spec.is_first:
            input_gradient = gradients.pop()
            _check_finite(f"input gradient of microbatch {microbatch}", input_gradient)
        if microbatch not in self.accumulated:
            # A power of two: undone in the exponent, without a rounding.
            loss_scale_exponent = math.frexp(self._loss_scale)[1] - 1
            self._accumulator.add(gradients, self._scale_exponent - loss_scale_exponent)
            self.accumulated.add(microbatch)
        return input_gradient

    def _check_step(self, step: int) -> None:
        if step != self.step + 1:
            raise WrongStepError(
                f"step {step} does not follow the state of stage {self.spec.stage}, "
                f"which contains {self.step}; load the state of {step - 1}"
            )

    def _check_totals(self, totals: Tensor) -> None:
        check_shape("totals", totals, self.sums.shape, torch.int64)


def _check_finite(what: str, tensor: Tensor) -> None:
    if tensor.numel() and not math.isfinite(largest(tensor.detach()).item()):
        raise NonFiniteError(f"{what} holds NaN or infinity; it was not sent on")
