"""The experts' kernels and the router on small shapes, each result judged: a run short enough for

    compute-sanitizer --tool racecheck --kernel-name kns=kernel --kernel-name kns=rows --kernel-name kns=pairs \\
        --kernel-name kns=gate --kernel-name kns=down python -m tests.kernels.triton.under_sanitizer portable|hopper

(or memcheck). Not a test: it needs a GPU and that tool. Everything else runs on the CPU, so that little is watched."""

import sys

import torch

from anabranch.kernels.triton import route
from anabranch.ops import ExpertsCall, RouteCall
from anabranch.ops.arguments import map_tensors
from tests.kernels.triton import test_experts as judge


def on_gpu(arguments: judge.Arguments) -> judge.Arguments:
    given: judge.Arguments = map_tensors(lambda tensor: tensor.cuda(), arguments)
    return given


def main(part: str) -> None:
    torch.manual_seed(0)
    for name, tiles in judge.GPU_TILES.items():
        for tokens, routing in ((3, "uniform"), (40, "uniform"), (40, "nowhere")):
            arguments = judge.draw(tokens, 8, 2, 192, 64, torch.bfloat16, "cpu", routing, scaling=1.5)
            given = on_gpu(arguments)
            if name.startswith("hopper") != (part == "hopper") or not judge.usable(tiles, given):
                continue
            found = judge.kernel.run(ExpertsCall(**given), tiles).cpu()
            error = judge.distance(found, judge.exact(arguments))
            print(f"{name}, {tokens} tokens, {routing}: off by {error:.1e}", flush=True)
            assert error <= judge.TOLERANCE[torch.bfloat16]
    if part != "hopper":
        arguments = judge.draw(40, 8, 2, 192, 64, torch.bfloat16)
        for mode in judge.COMBINES:
            found = judge.kernel.experts(ExpertsCall(**on_gpu(arguments), combine=mode)).cpu()
            assert judge.distance(found, judge.exact(arguments)) <= judge.TOLERANCE[torch.bfloat16], mode
        route.route(RouteCall(torch.randn(40, 60).cuda(), 4))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
