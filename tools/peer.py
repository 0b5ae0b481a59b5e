"""A training step in PyTorch on the CPU: the other side of `cargo x versus`.

    python -m venv venv && venv/bin/pip install torch torchvision
    venv/bin/python tools/peer.py resnet50 --size 128 --batch 32 --steps 5 --dtype bf16 --layout channels_last
    venv/bin/python tools/peer.py resnet50 --dtype f32 --rate 0.001 --check FILE

Cross-entropy on random images, SGD with momentum 0.9; bf16 is PyTorch's autocast. Prints one JSON object: images per
second of the median step, the seconds of every step, and the most memory the process held. The first steps, in which
PyTorch prepares its kernels, are not timed.

With --check nothing is timed: the weights and the batch that `paceline bench step --check FILE` wrote are loaded and two
steps computed in training mode without dropout, with learning rate --rate. Prints their losses and the norms of their
gradients.
"""

import argparse
import json
import math
import os
import resource
import struct
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

UNTIMED = 2
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


class MobileNet(nn.Module):
    """MobileNet in Keras' layout, with the names of Paceline's zoo. Zeros are added by the convolution where PyTorch
    can, and before it at stride 2, where Keras puts them below and right only."""

    BLOCKS = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]

    def __init__(self, classes):
        super().__init__()
        self.units = []
        self.unit("conv1", 3, 32, 3, stride=2)
        channels = 32
        for number, (outputs, stride) in enumerate(self.BLOCKS, 1):
            self.unit(f"conv_dw_{number}", channels, channels, 3, stride=stride, groups=channels)
            self.unit(f"conv_pw_{number}", channels, outputs, 1)
            channels = outputs
        self.dropout = nn.Dropout(1e-3)
        self.conv_preds = nn.Conv2d(channels, classes, 1)

    def unit(self, name, inputs, outputs, kernel, stride=1, groups=1):
        padding = kernel // 2 if stride == 1 else 0
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)
        self.add_module(name, conv)
        self.add_module(f"{name}_bn", norm)
        self.units.append((conv, norm))

    def forward(self, x):
        assert x.shape[-1] % 2 == 0, "of an odd size Keras would pad the first layer on all sides"
        for conv, norm in self.units:
            if conv.stride != (1, 1):
                x = F.pad(x, (0, 1, 0, 1))
            x = F.relu6(norm(conv(x)), inplace=True)
        x = F.adaptive_avg_pool2d(x, 1)
        return self.conv_preds(self.dropout(x)).flatten(1)


def make(name, classes):
    return MobileNet(classes) if name == "mobilenet" else torchvision.models.get_model(name, num_classes=classes)


def read(path):
    """The tensors of a safetensors file of f32 elements."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert entry["dtype"] == "F32" and (end - start) == 4 * math.prod(entry["shape"]), name
        tensors[name] = torch.frombuffer(data, dtype=torch.float32, count=(end - start) // 4, offset=start)
        tensors[name] = tensors[name].reshape(entry["shape"])
    return tensors


class Step:
    """One model, its optimizer and its batch; a call is one step of training."""

    def __init__(self, net, x, targets, options):
        layout = LAYOUTS[options.layout]
        self.net, self.x, self.targets = net.to(memory_format=layout).train(), x.to(memory_format=layout), targets
        self.bf16 = options.dtype == "bf16"
        self.optimizer = torch.optim.SGD(net.parameters(), lr=options.rate, momentum=0.9, fused=True)

    def gradients(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = F.cross_entropy(self.net(self.x), self.targets)
        loss.backward()
        return loss

    def __call__(self):
        loss = self.gradients()
        self.optimizer.step()
        return loss


def check(options):
    tensors = read(options.check)
    x, targets = tensors.pop("check.x").permute(0, 3, 1, 2), tensors.pop("check.targets").long()
    net = make(options.model, options.classes)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    missing, unexpected = net.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    assert not missing and not unexpected, f"missing {missing}, unexpected {unexpected}"
    step = Step(net, x, targets, options)
    losses, norms = [], []
    for _ in range(2):
        losses.append(float(step.gradients().detach()))
        norms.append(float(torch.stack([value.grad.double().norm() for value in net.parameters()]).norm()))
        step.optimizer.step()
    return {"losses": losses, "gradient_norms": norms}


def measure(options):
    torch.manual_seed(0)
    x = torch.randn(options.batch, 3, options.size, options.size)
    step = Step(make(options.model, options.classes), x, torch.randint(0, options.classes, (options.batch,)), options)
    for _ in range(UNTIMED):
        step()
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    assert math.isfinite(float(loss.detach())), "the loss is not a number: a time would mean nothing"
    median = sorted(seconds)[len(seconds) // 2]
    return {
        "model": options.model, "size": options.size, "batch": options.batch, "dtype": options.dtype,
        "layout": options.layout, "threads": torch.get_num_threads(), "images_per_s": options.batch / median,
        "step_s": median, "steps_s": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": torch.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--layout", choices=LAYOUTS, default="channels_last")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--check", metavar="FILE")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(json.dumps(check(options) if options.check else measure(options)))


if __name__ == "__main__":
    main()
