"""DeepSpeed with ZeRO stages 1 to 3 on the CPU, with Consumed, as on docs/trainers.md."""

import os
import sys
from itertools import islice
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

from energon_packed import Consumed, PackedDataset, PaddingFreeCollator, get_packed_loader, step_targets
from tests.trainers.recorder import Recorder, Spec


def settings(spec: Spec) -> dict[str, Any]:
    """Configuration of DeepSpeed for `stage N`, the kind of the run."""
    stage = 2 if spec.kind == "training_data" else int(spec.kind.split()[1])
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": spec.accumulation,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": spec.learning_rate, "torch_adam": True}},
    }


def main(spec: Spec) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it would be compiled, for a minute
    deepspeed.init_distributed(dist_backend="gloo")
    model, recorder = spec.load_model(), Recorder(spec)
    data = {"training_data": PackedDataset(spec.packs), "collate_fn": PaddingFreeCollator()}
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=settings(spec),
        **data if spec.kind == "training_data" else {},
    )
    if spec.kind != "training_data":
        loader = Consumed(get_packed_loader(spec.packs, epochs=1, num_workers=0))
    if spec.resume:
        _, client_state = engine.load_checkpoint(spec.checkpoints)
        loader.load_state_dict(client_state["loader"])
    while engine.global_steps < spec.steps(len(loader)):
        iterator = (batch for batch in loader)  # a loader of DeepSpeed starts again at each `iter`, as islice calls it
        while batches := list(islice(iterator, spec.accumulation)):
            targets = step_targets(batches)
            for number, batch in enumerate(batches, 1):
                engine.set_gradient_accumulation_boundary(number == len(batches))
                loss = engine(**batch | {"num_items_in_batch": targets}).loss
                recorder.record(batch, float(loss) * float(targets))
                engine.backward(loss, scale_wrt_gas=False)
                if number == len(batches) and spec.gradients:
                    recorder.keep(
                        {
                            name: deepspeed.utils.safe_get_full_grad(value)
                            for name, value in engine.module.named_parameters()
                        }
                    )
                engine.step()
            if spec.kind != "training_data":
                engine.save_checkpoint(spec.checkpoints, client_state={"loader": loader.state_dict()})
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        recorder.finish(dict(engine.module.named_parameters()))


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
