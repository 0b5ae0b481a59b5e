"""A training step in PyTorch on a GPU: the other side of the table that `cargo x gpu` makes.

    python3 tools/peer_gpu.py resnet50 224 256 [--modes eager,compile,graphs] [--limit 60]
    python3 tools/peer_gpu.py resnet50 224 256 --modes compile --prepare

Cross-entropy over 1,000 classes on random images that are on the GPU, bf16 by autocast, channels_last, fused SGD with
momentum, cuDNN's engines tried; as it is (eager), by torch.compile (compile), and by torch.compile with CUDA graphs
(graphs, mode "reduce-overhead"). Prints a line for each mode: images per second of the median of several repeats, what
the fastest and the slowest said, and the most memory that tensors took, in GiB.

A mode that takes longer than --limit seconds, compiling included, is given up. With --prepare nothing is timed: the step
is compiled, and the caches that it leaves (TORCHINDUCTOR_CACHE_DIR) make the next process quick.
"""

import argparse
import gc
import signal
import statistics
import sys
import time

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

CLASSES = 1000
MODES = {"eager": None, "compile": "default", "graphs": "reduce-overhead"}
# Steps before the clock starts, seconds and number of repeats.
UNTIMED, REPEAT_S, REPEATS = 8, 0.5, 5


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.downsample = nn.Sequential(*shortcut) if changes else nn.Identity()

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x), inplace=True)


def resnet20(num_classes):
    """He et al. (2015) for 32×32 images, as in Paceline's zoo: stages of 16, 32 and 64 channels, three blocks each."""
    layers = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    inputs = 16
    for outputs in (16, 32, 64):
        for number in range(3):
            layers.append(Block(inputs, outputs, 2 if number == 0 and outputs > 16 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


def make(name):
    return resnet20(CLASSES) if name == "resnet20" else torchvision.models.get_model(name, num_classes=CLASSES)


class Step:
    """A model, its optimizer and a batch, and a step of them."""

    def __init__(self, options, mode):
        torch.manual_seed(0)
        self.device = torch.device(options.device)
        self.mode = mode
        model = make(options.model).to(self.device, memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        shape = (options.batch, 3, options.size, options.size)
        self.x = torch.randn(shape, device=self.device).to(memory_format=torch.channels_last)
        self.y = torch.randint(0, CLASSES, (options.batch,), device=self.device)
        self.forward = torch.compile(model, mode=MODES[mode]) if MODES[mode] else model

    def run(self, times):
        """So many steps; the seconds that one of them took."""
        begin = time.perf_counter()
        for _ in range(times):
            if self.mode == "graphs":
                torch.compiler.cudagraph_mark_step_begin()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(self.forward(self.x), self.y)
            loss.backward()
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / times


def measure(options, mode):
    """What a mode does, as words."""
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step = Step(options, mode)
    if options.prepare:
        return f"prepared in {step.run(1):.0f} s"
    step.run(UNTIMED)
    # Trying engines takes memory that steps do not. A graph takes its memory when it is recorded, and engines were tried
    # by the modes before it.
    if on_gpu and mode != "graphs":
        torch.cuda.reset_peak_memory_stats()
    times = min(max(int(REPEAT_S / step.run(3)), 5), 500)
    seconds = sorted(step.run(times) for _ in range(REPEATS))
    median = statistics.median(seconds)
    gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    spread = f"{seconds[0] * 1e3:.3f} to {seconds[-1] * 1e3:.3f}"
    return f"{options.batch / median:.0f} images/s, {median * 1e3:.3f} ms a step ({spread}), {gib:.3f} GiB"


def late(_signal, _frame):
    raise TimeoutError


def attempt(options, mode):
    """Measures a mode within its limit; whether it worked."""
    signal.setitimer(signal.ITIMER_REAL, options.limit)
    try:
        words, worked = measure(options, mode), True
    except Exception as error:  # Whatever stops a mode must not stop the next one.
        words, worked = f"failed: {type(error).__name__} {' '.join(str(error).split())[:200]}", False
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(f"torch {options.model} {options.size} {options.batch} {mode} {words}", flush=True)
    torch.compiler.reset()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return worked


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("size", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--limit", type=float, default=300, help="seconds of one mode")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu, to try the script out")
    options = parser.parse_args()
    for mode in options.modes:
        if mode not in MODES:
            parser.error(f"{mode} is no mode: {', '.join(MODES)}")
    # Engines are tried where nothing else runs beside them.
    torch.backends.cudnn.benchmark = not options.prepare
    signal.signal(signal.SIGALRM, late)
    worked = [attempt(options, mode) for mode in options.modes]
    sys.exit(0 if any(worked) else 1)


main()
