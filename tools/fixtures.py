"""Makes the fixtures that crates/nn/tests/models.rs compares the models with.

    python -m venv venv && venv/bin/pip install numpy torch torchvision
    venv/bin/python tools/fixtures.py [--only MODEL,…] [--macs]

Writes one JSON file per model to crates/nn/tests/fixtures: logits in evaluation, and of one training pass the logits,
the loss, every parameter's gradient (L2 norm, dot product with a fixed vector, four elements) and the running statistics
afterwards (norm, dot product), all computed by PyTorch in float64 on the CPU; and how far from kinks of ReLU and ties of
maxima all this is (`margin`). torchvision's own models are used where it has them, the twins in twins.py elsewhere.
Dropout is off.

Weights are not stored: both sides make them, the inputs and the dot vectors from names by the same rule, whose Rust half
is crates/nn/tests/support/rule.rs. Change one, raise RULE and run this again.

--macs prints each model's forward multiply-adds at its native size and makes nothing.
"""

import argparse
import json
import math
import os
import pathlib

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
import numpy as np
import torch
import torch.nn.functional as F
import torchvision

from twins import TWINS, Twin

RULE = 1
# How many errors of float32 every ReLU stands from its kink, and how many inputs and passes over the model, each of which
# may draw biases again, are tried for that; see `steady`.
MARGIN, DRAWS, PASSES = 3.0, 64, 200
CLASSES = 10
FOLDER = pathlib.Path(__file__).parent.parent / "crates/nn/tests/fixtures"

# Model: (batch, image side, channels), or (batch, sequence). The smallest sizes that leave more than one pixel to the
# last normalisation, whose variance over a few numbers would magnify rounding.
SIZES = {
    "mlp": (4, 32, 3), "lenet5": (4, 28, 1), "cnn5": (4, 32, 3), "resnet9": (4, 32, 3), "resnet20": (4, 32, 3), "alexnet": (4, 63, 3),
    **{f"vgg{depth}{norm}": (4, 32, 3) for depth in (11, 13, 16, 19) for norm in ("", "_bn")},
    **{f"resnet{depth}": (4, 33, 3) for depth in (18, 34, 50, 101, 152)},
    **{f"resnet{depth}v2": (4, 33, 3) for depth in (50, 101, 152)},
    "googlenet": (4, 47, 3), "inceptionv3": (4, 107, 3), "inceptionresnetv2": (3, 107, 3), "mobilenet": (4, 64, 3),
    "xception": (4, 39, 3), "lstm": (3, 12), "gpt": (3, 16),
}
NATIVE = {"inceptionv3": 299, "inceptionresnetv2": 299, "xception": 299}

U = np.uint64
WEYL = U(0x9E3779B97F4A7C15)


def mix(word):
    word = (word ^ (word >> U(30))) * U(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> U(27))) * U(0x94D049BB133111EB)
    return word ^ (word >> U(31))


def key_of_text(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & (2**64 - 1)
    return mix(np.array([value], dtype=U))[0]


def words(name, count, start=0):
    """The 64-bit draws start..start+count of the stream called `name`."""
    with np.errstate(over="ignore"):
        return mix(key_of_text(name) + WEYL * (np.arange(start, start + count, dtype=U) + U(1)))


def uniform(name, count):
    """`count` float32 numbers in [-1, 1), in blocks that keep a hundred million of them in memory."""
    out = np.empty(count, dtype=np.float32)
    block = 1 << 22
    for start in range(0, count, block):
        part = words(name, min(block, count - start), start)
        out[start:start + block] = ((part >> U(40)).astype(np.float64) / 2**23 - 1).astype(np.float32)
    return out


def rule(name, shape, names):
    """A tensor's centre and spread; `names` are those of all tensors of the model.

    Normalised values have their mean two deviations or more above zero, so that few of them lie within rounding of ReLU's kink
    and rounding does not grow from layer to layer; the last normalisation of a residual branch keeps the sum from
    growing.
    """
    layer, kind = name.rpartition(".")[::2]
    if len(shape) > 1:
        return 0.0, math.sqrt(6 / math.prod(shape[1:]))
    if f"{layer}.running_mean" not in names:
        return (1.0, 0.1) if kind == "weight" else (0.0, 0.1)
    last = layer.endswith((".bn3", ".downsample.1", "_sepconv3_bn")) or \
        layer.endswith(".bn2") and f"{layer[:-1]}3.weight" not in names
    scaled = f"{layer}.weight" in names
    return {
        "weight": (0.3, 0.1) if last else (0.5, 0.1),
        "bias": (0.0, 0.1) if last else (1.0, 0.1) if scaled else (2.5, 0.1),
        "running_mean": (0.0, 0.1),
        "running_var": (1.0, 0.2),
    }[kind]


def tensor(name, shape, names, redrawn):
    centre, spread = rule(name, shape, names)
    stream = f"{name}:{redrawn[name]}" if name in redrawn else name
    values = np.float32(centre) + np.float32(spread) * uniform(stream, math.prod(shape))
    return torch.from_numpy(values.reshape(shape))


def make(model, size, classes=CLASSES):
    """The PyTorch model in float32, not yet filled."""
    if model in TWINS:
        example = torch.zeros(2, size[1], dtype=torch.int64) if len(size) == 2 else torch.zeros(2, size[2], *size[1:2] * 2)
        return Twin(TWINS[model], classes, example)
    if model == "googlenet":
        return torchvision.models.googlenet(num_classes=classes, aux_logits=False, init_weights=False)
    with no_start():
        return torchvision.models.get_model(model, num_classes=classes)


class no_start:
    """Skips torchvision's initialisation, since every tensor is filled afterwards."""

    names = ("kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_")

    def __enter__(self):
        self.saved = {name: getattr(torch.nn.init, name) for name in self.names}
        for name in self.names:
            setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)

    def __exit__(self, *_):
        for name, function in self.saved.items():
            setattr(torch.nn.init, name, function)


def states(net):
    return {name: value for name, value in net.named_buffers() if "running" in name}


def filled(model, size, dtype, redrawn):
    """The PyTorch model by the rule; `redrawn` biases are those of another draw."""
    net = make(model, size).to(dtype)
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    fill(net, redrawn)
    return net


@torch.no_grad()
def fill(net, redrawn):
    tensors = dict(net.named_parameters()) | states(net)
    for name, value in tensors.items():
        value.copy_(tensor(name, tuple(value.shape), tensors.keys(), redrawn))


def batch(size, dtype, salt=""):
    """Inputs and targets; images are drawn in the order batch, height, width, channel."""
    if len(size) == 2:
        count = size[0] * size[1]
        x = torch.from_numpy((words("x" + salt, count) % U(CLASSES)).astype(np.int64).reshape(size))
        rows = count
    else:
        shape = (size[0], size[1], size[1], size[2])
        values = np.float32(math.sqrt(3)) * uniform("x" + salt, math.prod(shape))
        x = torch.from_numpy(values.reshape(shape)).permute(0, 3, 1, 2).contiguous().to(dtype)
        rows = size[0]
    return x, torch.from_numpy((words("targets" + salt, rows) % U(CLASSES)).astype(np.int64))


def digits(value):
    return float(f"{float(value):.9g}")


def summary(name, value, samples):
    """Norm, dot product with the vector named after the tensor, and so many sampled elements."""
    flat = value.detach().reshape(-1).to(torch.float64).numpy()
    dot = sum(float(flat[start:start + (1 << 22)] @ part) for start, part in dot_blocks(name, flat.size))
    chosen = (words("sample:" + name, samples) % U(flat.size)).astype(np.int64)
    return [digits(number) for number in (np.linalg.norm(flat), dot, *flat[chosen])]


def dot_blocks(name, count):
    block = 1 << 22
    for start in range(0, count, block):
        part = words("dot:" + name, min(block, count - start), start)
        yield start, (part >> U(40)).astype(np.float64) / 2**23 - 1


def gradients(net, x, targets):
    net.train()
    net.zero_grad()
    logits = net(x)
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    return logits.detach(), loss.detach(), {name: value.grad for name, value in net.named_parameters()}


class Kinks:
    """While active, collects the `inputs` of ReLUs and maxima and the `distances` of their nearest elements from the kink.

    Given what float32 is off by at each, it also has biases of layers drawn again where a kink is too near, by numbers in
    `redrawn`. A bias is added to all that the ReLU behind it is given, so one pass over the model can do so for all of them.
    A maximum right behind the inputs, which no bias moves, leaves it stuck.
    """

    def __init__(self, net, redrawn=None, errors=None):
        self.net, self.redrawn, self.errors = net, redrawn, errors
        self.saved, self.hooks, self.called = {}, [], []
        self.inputs, self.distances, self.are_gaps, self.changes, self.is_stuck = [], [], [], 0, False

    def __enter__(self):
        self.names = (dict(self.net.named_parameters()) | states(self.net)).keys()
        for name, look in (("relu", self.relu), ("relu6", self.relu6), ("max_pool2d", self.max_pool)):
            self.saved[name] = getattr(F, name)
            setattr(F, name, self.watched(self.saved[name], look))
        for name, module in self.net.named_modules():
            if isinstance(getattr(module, "bias", None), torch.nn.Parameter):
                call = lambda module, _, name=name: self.called.append((f"{name}.bias", module.bias))
                self.hooks.append(module.register_forward_pre_hook(call))
        return self

    def __exit__(self, *_):
        for name, function in self.saved.items():
            setattr(F, name, function)
        for hook in self.hooks:
            hook.remove()

    def watched(self, function, look):
        def call(x, *arguments, **options):
            look(x, *arguments, **options)
            return function(x, *arguments, **options)
        return call

    def note(self, distance, x, is_gap=False):
        self.inputs.append(x.clone())
        self.distances.append(distance)
        self.are_gaps.append(is_gap)

    def is_near(self, distance):
        return self.errors is not None and distance < 1.1 * MARGIN * self.errors[len(self.distances)]

    def draw_again(self, layer):
        name, bias = layer
        self.redrawn[name] = self.redrawn.get(name, 0) + 1
        self.changes += 1
        before = bias.detach().clone()
        bias.copy_(tensor(name, tuple(bias.shape), self.names, self.redrawn))
        return bias - before

    def rectifier(self, x, distance_of):
        for _ in range(200):
            if not self.is_near(distance_of(x)):
                break
            change = self.draw_again(self.called[-1])
            x += change.reshape(-1, *[1] * (x.dim() - 2))
        self.note(distance_of(x), x)

    def relu(self, x, *_, **__):
        self.rectifier(x, lambda x: float(x.abs().min()))

    def relu6(self, x, *_, **__):
        self.rectifier(x, lambda x: float(torch.minimum(x.abs(), (x - 6).abs()).min()))

    def max_pool(self, x, kernel, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        if kernel == 1:
            return
        stride = kernel if stride is None else stride
        extra = stride if ceil_mode else 0
        padded = F.pad(x, (padding, padding + extra, padding, padding + extra), value=-math.inf)
        windows = padded.unfold(2, kernel, stride).unfold(3, kernel, stride).flatten(4)
        first, second = windows.topk(2, dim=-1).values.unbind(-1)
        # Exact ties are harmless: zeros come from a ReLU, which stops their gradient, and other equals are one value
        # that an earlier maximum handed out twice and that gathers both gradients. A window may also hold one pixel.
        gaps = (first - second)[(first != second) & second.isfinite()]
        distance = float(gaps.min()) if gaps.numel() else math.inf
        # The bias before would move both alike; one further back moves them in another way, in the next pass. Of layers side
        # by side not all are before the maximum, so the choice changes.
        if self.is_near(distance):
            self.is_stuck |= len(self.called) < 2
            if len(self.called) > 1:
                back = sum(self.redrawn.values()) % min(len(self.called) - 1, 12)
                self.draw_again(self.called[-2 - back])
        self.note(distance, x, is_gap=True)


@torch.no_grad()
def kinks(net, size, dtype, salt, redrawn=None, errors=None):
    x = batch(size, dtype, salt)[0]
    with Kinks(net, redrawn, errors) as found:
        net(x)
    return found


def rounding(exact, net, size, salt):
    """The largest error of float32 at each ReLU, and the mean one (root of the mean square) of a gap at each maximum: there are
    too many gaps for the largest, and both sides of one are of the same channel and off by much the same."""
    rough = kinks(net, size, torch.float32, salt)
    apart = [(x - y).abs() for x, y in zip(exact.inputs, rough.inputs)]
    error = lambda apart, is_gap: float((2 * apart.square().mean()).sqrt() if is_gap else apart.max())
    return [max(error(*pair), 1e-12) for pair in zip(apart, exact.are_gaps)]


def steady(model):
    """Chooses the inputs, and biases of layers, so that every ReLU stands MARGIN errors of float32 (see `rounding`), or further,
    from its kink, and every maximum from a tie: on the other side a gradient jumps, however exact a kernel is.

    An input alone does not do it for a deep model. For resnet152 the best of 40 left six of 3.3 million ReLUs within 5e-6
    of a deviation of their kink, where float32 is off by about as much (root of the mean square: 4.1e-6 with AVX2,
    4.2e-6 with AVX-512, 4.3e-6 portable; at most 5e-5). One of them, behind the sum of layer3.4, was -4.9e-6 in float64 and
    positive with AVX2 alone: 149 gradients were up to 1.2e-3 off, and no kernel was wrong. So where a kink is too near, the
    layer before it draws its bias again. Returns the draw of the inputs, those of the biases, and the margin.
    """
    size = SIZES[model]
    for salt in (f":{draw}" for draw in range(DRAWS)):
        redrawn = {}
        exact, rough = (filled(model, size, dtype, redrawn).train() for dtype in (torch.float64, torch.float32))
        errors = rounding(kinks(exact, size, torch.float64, salt), rough, size, salt)
        for _ in range(PASSES):
            found = kinks(exact, size, torch.float64, salt, redrawn, errors)
            if found.is_stuck:
                break
            if found.changes:
                continue
            # The errors were those of other biases.
            fill(rough, redrawn)
            errors = rounding(found, rough, size, salt)
            margin = min(distance / error for distance, error in zip(found.distances, errors))
            if margin > MARGIN:
                print(f"{model:20} draw {salt}, {len(redrawn)} biases drawn again: {margin:.2f} errors from the kinks", flush=True)
                return salt, redrawn, margin
    raise SystemExit(f"{model}: no input and no biases stand {MARGIN} errors of float32 from the kinks")


def fixture(model):
    size = SIZES[model]
    salt, redrawn, margin = steady(model) if len(size) == 3 else (":0", {}, None)
    net = filled(model, size, torch.float64, redrawn)
    x, targets = batch(size, torch.float64, salt)
    net.eval()
    with torch.no_grad():
        evaluated = net(x)
    logits, loss, found = gradients(net, x, targets)
    return {
        "model": model, "rule": RULE, "torch": torch.__version__, "torchvision": torchvision.__version__,
        "dtype": "float64", "size": size, "classes": CLASSES, "draw": salt,
        "redrawn": redrawn, "margin": margin and float(f"{margin:.3g}"),
        "eval_logits": [digits(value) for value in evaluated.reshape(-1)],
        "train_logits": [digits(value) for value in logits.reshape(-1)],
        "loss": digits(loss),
        "gradients": {name: summary(name, value, 4) for name, value in found.items()},
        "states": {name: summary(name, value, 0) for name, value in states(net).items()},
    }


def steps():
    """The losses of ten steps of SGD with momentum: resnet20, weight decay on weights only."""
    size = (16, 32, 3)
    net = filled("resnet20", size, torch.float64, {}).train()
    named = list(net.named_parameters())
    groups = [
        {"params": [value for _, value in named if value.dim() > 1], "weight_decay": 5e-4},
        {"params": [value for _, value in named if value.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    losses = []
    for step in range(10):
        x, targets = batch(size, torch.float64, f":{step}")
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), targets)
        loss.backward()
        optimizer.step()
        losses.append(digits(loss.detach()))
    return {"model": "resnet20", "rule": RULE, "torch": torch.__version__, "dtype": "float64", "size": size,
            "classes": CLASSES, "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "losses": losses}


def macs(model):
    from torch.utils.flop_counter import FlopCounterMode
    size = (1, 128) if len(SIZES[model]) == 2 else (1, NATIVE.get(model, 224 if SIZES[model][1] > 32 or "vgg" in model
                                                   else SIZES[model][1]), SIZES[model][2])
    net = make(model, size, 65 if len(size) == 2 else 1000 if size[1] > 32 else 10).eval()
    x = torch.zeros(size, dtype=torch.int64) if len(size) == 2 else torch.zeros(1, size[2], size[1], size[1])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(x)
    return counter.get_total_flops() / 2e9


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--macs", action="store_true")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model in options.only.split(",") if options.only else SIZES:
        if options.macs:
            print(f"{model:20} {macs(model):.4f} GMACs", flush=True)
        elif model != "resnet20_steps":
            write(model, fixture(model))
    if not options.macs and (not options.only or "resnet20_steps" in options.only):
        write("resnet20_steps", steps())


def write(name, content):
    text = json.dumps(content, indent=None, separators=(",", ":")).replace('],"', '],\n"').replace(',"gradients"', ',\n"gradients"')
    (FOLDER / f"{name}.json").write_text(text + "\n")
    print(f"{name}: {len(text) / 1024:.1f} KiB", flush=True)


if __name__ == "__main__":
    main()
