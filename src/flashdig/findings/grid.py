"""Grids: fewer blocks than SMs, a last wave that is nearly empty, uneven causal work, decoding."""

from __future__ import annotations

import math
from statistics import median

from flashdig.costs.grid import Grid, makespan
from flashdig.costs.traffic import tiles_per_program
from flashdig.costs.units import percent, seconds
from flashdig.findings.finding import Advice, Finding, Number
from flashdig.findings.recording import Recording, main_kernel, place, times
from flashdig.hardware.arch import architecture
from flashdig.hardware.occupancy import occupancy
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.kernel_names import KernelName
from flashdig.readers.model import Kernel
from flashdig.readers.summary import AttentionGroup

# a kernel this short is over before more SMs could help
_LEAST_KERNEL_NS = 8_000
_LEAST_SHARE = 0.02
_LEAST_LOSS = 0.15
_LEAST_DECODE_KEYS = 1024


def small_grid(recording: Recording) -> list[Finding]:
    """Attention kernels with fewer blocks than the device has SMs."""
    found = []
    for group in recording.groups:
        seen = _main(recording, group)
        if seen is None or group.first.is_decoding:
            continue
        kernel, sms = seen
        blocks = kernel.configuration.num_blocks or 0
        total_ns = sum(k.duration_ns for k in _mains(group))
        if blocks >= sms or not _worth(recording, kernel, total_ns):
            continue
        if recording.busy_ns < 0.5 * recording.elapsed_ns and recording.launches_limit:
            continue  # a device that waits for launches has nothing to gain from more blocks
        call = group.first
        asked = f" (batch {call.sizes.batch} x {call.sizes.num_heads} heads x query tiles)"
        found.append(
            Finding(
                rule="small-grid",
                device_ns=(1 - blocks / sms) * kernel.duration_ns,
                calls=tuple(group.calls),
                backend=group.first.backend,
                verdict="slow",
                claim=(
                    f"The grid has {blocks} blocks{asked if call.sizes.batch else ''} for {sms} "
                    f"SMs: {percent(1 - blocks / sms)} of the device idles for the whole "
                    f"{seconds(kernel.duration_ns / 1e9)}."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("blocks", blocks, "count", place(kernel)),
                    Number("SMs", sms, "count", "deviceProperties"),
                ),
                gain=recording.device_gain(
                    total_ns / 1e9 * (1 - blocks / sms),
                    "the same work spread over all SMs: an upper bound",
                ),
                advice=Advice(
                    "Put more sequences or heads into one call; for few queries against many keys "
                    "split the keys.",
                    "# calls that could run together, as one batch\n"
                    "q, k, v = (torch.cat(parts) for parts in (qs, ks, vs))\n"
                    "out = F.scaled_dot_product_attention(q, k, v)",
                    ("F", "torch", "qs", "ks", "vs"),
                ),
                confidence="likely",
            )
        )
    return found


def decode_without_split(recording: Recording) -> list[Finding]:
    """One query against a long cache, on a few SMs."""
    found = []
    for group in recording.groups:
        seen = _main(recording, group)
        if seen is None or not group.first.is_decoding:
            continue
        kernel, sms = seen
        blocks = kernel.configuration.num_blocks or 0
        keys = median(call.sizes.seqlen_k or 0 for call in group.calls)
        split = "split" in kernel.name.lower() or any(
            "combine" in event.name.lower() for event in group.first.events
        )
        if blocks >= sms or keys < _LEAST_DECODE_KEYS or split:
            continue
        guess = recording.expected(group.first.problem(), "v2", "decode")
        typical = group.median_device_ns or 0
        if guess is None or typical < 1.3e9 * guess.expected_s:
            continue
        saved = group.count * (typical / 1e9 - guess.expected_s)
        found.append(
            Finding(
                rule="decode-without-split",
                device_ns=typical - guess.expected_s * 1e9,
                calls=tuple(group.calls),
                backend=group.first.backend,
                verdict="slow",
                claim=(
                    f"One query against {keys:,.0f} keys runs in {blocks} blocks on {sms} SMs: the "
                    f"cache is read by {percent(min(1.0, blocks / sms))} of the device. A kernel "
                    f"that splits the keys takes about {seconds(guess.expected_s)} instead of "
                    f"{seconds(typical / 1e9)}."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("blocks", blocks, "count", place(kernel)),
                    Number("device time of a call", typical, "ns", place(kernel)),
                    Number("guess with split keys", guess.expected_s * 1e9, "ns"),
                ),
                gain=recording.device_gain(saved, "the model of a decode step with split keys"),
                advice=Advice(
                    "Take a backend with split keys (Flash-Decoding), as torch's flash backend.",
                    "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
                    "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):\n"
                    "    out = F.scaled_dot_product_attention(q, k, v)",
                    ("F", "q", "k", "v"),
                ),
            )
        )
    return found


def tail_wave(recording: Recording) -> list[Finding]:
    """Blocks of equal length whose last wave fills a few SMs only."""
    found = []
    for group in recording.groups:
        grid = _equal_blocks(recording, group)
        if grid is None:
            continue
        kernel, waves = grid
        lost = 1 - waves.tail_efficiency
        total_ns = sum(k.duration_ns for k in _mains(group))
        if not 1 < waves.waves < 4 or lost < _LEAST_LOSS:
            continue
        if not _worth(recording, kernel, total_ns):
            continue
        found.append(
            Finding(
                rule="tail-wave",
                device_ns=lost * kernel.duration_ns,
                calls=tuple(group.calls),
                backend=group.first.backend,
                verdict="slow",
                claim=(
                    f"{waves.programs:,} blocks of equal work make {waves.waves:.3g} waves over "
                    f"{waves.sm_count} SMs with {waves.blocks_per_sm} blocks each: the last wave "
                    f"is {percent(waves.waves % 1)} full, and {percent(lost)} of the block slots "
                    "idle."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("blocks", waves.programs, "count", place(kernel)),
                    Number("blocks an SM holds", waves.blocks_per_sm, "count"),
                ),
                gain=recording.device_gain(
                    lost * total_ns / 1e9, "slots of the last wave that no block fills"
                ),
                advice=Advice(
                    "Choose a batch whose blocks fill whole waves, or a persistent kernel "
                    "(cuDNN, FlashAttention-3, flashdig), which evens the end out.",
                    "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
                    "with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):\n"
                    "    out = F.scaled_dot_product_attention(q, k, v)",
                    ("F", "q", "k", "v"),
                ),
                confidence="likely",
            )
        )
    return found


def causal_imbalance(recording: Recording) -> list[Finding]:
    """Causal blocks differ in length up to the number of key tiles, and the grid ends unevenly."""
    found = []
    for group in recording.groups:
        call = group.first
        launch = _tiled_launch(recording, group)
        problem = call.problem()
        if launch is None or problem is None or not call.mask.causal:
            continue
        kernel, name, resident, sms = launch
        block_m, block_n = (name.tile or (0, 0))[:2]
        heads = problem.batch * problem.num_heads
        tiles = tiles_per_program(problem, block_m, block_n)
        if len(tiles) * heads != kernel.configuration.num_blocks or len(tiles) < 4:
            continue
        even = sum(tiles) * heads / (sms * resident)
        # short blocks first is what a plain grid does; long ones first is what it should do
        rising = makespan(tiles, sms * resident, heads) / even
        falling = makespan(tiles[::-1], sms * resident, heads) / even
        loss = 1 - 1 / rising
        total_ns = sum(k.duration_ns for k in _mains(group))
        if loss < _LEAST_LOSS or rising - falling < 0.1:
            continue
        if not _worth(recording, kernel, total_ns):
            continue
        found.append(
            Finding(
                rule="causal-imbalance",
                device_ns=(1 - falling / rising) * kernel.duration_ns,
                calls=tuple(group.calls),
                backend=group.first.backend,
                verdict="slow",
                claim=(
                    f"Causal blocks work on 1 to {max(tiles)} key tiles. If the short ones start "
                    f"first, as in a plain grid, the last long ones keep the device waiting: "
                    f"{percent(loss)} of its time, against {percent(1 - 1 / falling)} with the "
                    "long ones first."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("blocks", kernel.configuration.num_blocks or 0, "count", place(kernel)),
                    Number(
                        "longest block over the mean",
                        max(tiles) / (sum(tiles) / len(tiles)),
                        "ratio",
                    ),
                ),
                gain=recording.device_gain(
                    (1 - falling / rising) * total_ns / 1e9,
                    "list scheduling of the blocks, long ones first against short ones first",
                ),
                advice=Advice(
                    "Take a kernel that schedules long blocks first or evens the end out.",
                    "import flashdig\n"
                    "rows = [x.transpose(1, 2) for x in (q, k, v)]\n"
                    "out = flashdig.attention(*rows, causal=True)",
                    ("q", "k", "v"),
                ),
                confidence="possible",
            )
        )
    return found


def _mains(group: AttentionGroup) -> list[Kernel]:
    return [found[0] for call in group.calls if (found := main_kernel(call)) is not None]


def _main(recording: Recording, group: AttentionGroup) -> tuple[Kernel, int] | None:
    """The group's longest attention kernel and the SMs of its device."""
    kernels = _mains(group)
    if not kernels:
        return None
    kernel = max(kernels, key=lambda one: one.duration_ns)
    device = recording.properties(kernel)
    if device is None or not device.num_sms or not kernel.configuration.num_blocks:
        return None
    return kernel, device.num_sms


def _worth(recording: Recording, kernel: Kernel, total_ns: float) -> bool:
    share = recording.share(total_ns) or 0
    return kernel.duration_ns >= _LEAST_KERNEL_NS and share >= _LEAST_SHARE


def _tiled_launch(
    recording: Recording, group: AttentionGroup
) -> tuple[Kernel, KernelName, int, int] | None:
    """Main kernel, name, blocks an SM holds, SMs; for forward kernels with a block a tile."""
    seen = _main(recording, group)
    if seen is None or group.first.pass_ != "forward":
        return None
    kernel, sms = seen
    found = next(f for c in group.calls if (f := main_kernel(c)) is not None and f[0] is kernel)
    name = found[1]
    device = recording.properties(kernel)
    if name.tile is None or device is None or device.compute_capability is None:
        return None
    if "ersistent" in kernel.name:
        return None
    major, minor = device.compute_capability
    try:
        fit = occupancy(
            architecture(f"sm_{major}{minor}"),
            threads_per_block=kernel.configuration.threads_per_block or 0,
            registers_per_thread=kernel.registers_per_thread or 0,
            shared_bytes_per_block=kernel.shared_memory_bytes or 0,
        )
    except ValueError:
        return None
    return (kernel, name, fit.blocks_per_sm, sms) if fit.blocks_per_sm else None


def _equal_blocks(recording: Recording, group: AttentionGroup) -> tuple[Kernel, Grid] | None:
    """The main kernel's grid, where every block has the same work."""
    launch = _tiled_launch(recording, group)
    call = group.first
    if launch is None or call.mask.kind not in ("none", "tensor") or call.is_decoding:
        return None
    kernel, name, resident, sms = launch
    blocks = kernel.configuration.num_blocks or 0
    if not _a_block_a_tile(call, name, blocks):
        return None
    return kernel, Grid(blocks, sms, resident)


def _a_block_a_tile(call: AttentionCall, name: KernelName, blocks: int) -> bool:
    sizes = call.sizes
    if sizes.split is None or sizes.seqlen_q is None or name.tile is None:
        return False
    tiles = math.ceil(sizes.seqlen_q / name.tile[0])
    return blocks == tiles * sizes.split[0] * sizes.split[1]
