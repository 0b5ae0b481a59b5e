"""The parts of `cargo x lerat` that are not Paceline: the repeated data set, and PyTorch's DDP over gloo on the same cores and files.

    python lerat.py repeat SOURCE TARGET TIMES      # every training image TIMES times: as it is, and with augmentation written out
    python lerat.py ddp MODEL FOLDER BATCH STEPS THREADS   # one rank, described by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; CORE pins it

Needs torch and torchvision (and Pillow, which comes with them). `ddp` prints one JSON object with the seconds of each step.
"""

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def write_versions(job):
    """A copy of an image, and versions of it: turned by up to 12 degrees, cut, brighter or darker; drawn from its name and number."""
    import random

    from PIL import Image, ImageEnhance

    source, target, times = job
    source, target = Path(source), Path(target)
    (target / source.name).write_bytes(source.read_bytes())
    image = Image.open(source).convert("RGB")
    width, height = image.size
    for number in range(1, times):
        draw = random.Random(f"{source.name} {number}")
        version = image.rotate(draw.uniform(-12, 12), resample=Image.BILINEAR)
        part = draw.uniform(0.8, 1.0)
        left, top = draw.uniform(0, 1 - part) * width, draw.uniform(0, 1 - part) * height
        version = version.crop((int(left), int(top), int(left + part * width), int(top + part * height)))
        version = ImageEnhance.Brightness(version).enhance(draw.uniform(0.7, 1.3))
        version = ImageEnhance.Color(version).enhance(draw.uniform(0.7, 1.3))
        version.save(target / f"{source.stem}-{number:02}.jpg", quality=90)


def repeat(source, target, times):
    jobs = []
    for folder in sorted(Path(source, "train").iterdir()):
        place = Path(target, "train", folder.name)
        place.mkdir(parents=True, exist_ok=True)
        jobs += [(str(file), str(place), times) for file in sorted(folder.iterdir()) if file.suffix.lower() in (".jpg", ".jpeg", ".png")]
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_versions, jobs, chunksize=8))


def ddp(name, folder, batch, steps, threads):
    import torch
    import torch.distributed as dist
    import torchvision
    from torchvision import transforms

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "CORE" in os.environ:
        os.sched_setaffinity(0, [int(core) for core in os.environ["CORE"].split(",")])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    look = transforms.Compose([
        transforms.Resize((224, 224)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    data = torchvision.datasets.ImageFolder(os.path.join(folder, "train"), look)
    model = getattr(torchvision.models, name)(num_classes=len(data.classes)).to(memory_format=torch.channels_last)
    if world > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    sampler = torch.utils.data.DistributedSampler(data, world, rank, seed=0)
    loader = torch.utils.data.DataLoader(data, batch // world, sampler=sampler, num_workers=1, drop_last=True, prefetch_factor=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loss = torch.nn.CrossEntropyLoss()
    seconds, before = [], None
    while len(seconds) < steps + 1:
        for images, labels in loader:
            before = before or time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            loss(model(images.contiguous(memory_format=torch.channels_last)), labels).backward()
            optimizer.step()
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
            if len(seconds) == steps + 1:
                break
    if rank == 0:
        print(json.dumps({"torch": torch.__version__, "seconds": seconds}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["repeat"] and len(sys.argv) == 5:
        repeat(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1:2] == ["ddp"] and len(sys.argv) == 7:
        ddp(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
    else:
        sys.exit(__doc__)
