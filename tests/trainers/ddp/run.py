"""A DDP loop, as on docs/train-torch.md, and the same loop with an error of each kind that the harness must find."""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from energon_packed import DataflowLoader, MapDistributor, PackedDataset, get_packed_loader, step_targets
from tests.trainers.recorder import Recorder, Spec


def main(spec: Spec) -> None:
    torch.distributed.init_process_group("gloo")
    recorder, model = Recorder(spec), DistributedDataParallel(spec.load_model())
    recorder.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)
    end = "drop" if spec.kind == "drop" else "repeat"
    loader: Any = (
        DataflowLoader(MapDistributor(PackedDataset(spec.packs)), num_workers=0)
        if spec.kind == "dataflow"
        else get_packed_loader(spec.packs, epochs=1, num_workers=0, epoch_end=end)  # type: ignore[arg-type]
    )
    folder = Path(spec.checkpoints)
    folder.mkdir(parents=True, exist_ok=True)
    step = 0
    if spec.resume:
        own = torch.load(folder / f"{latest(folder)}-{spec.rank}.pt")
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
        step = own["step"]
        if spec.kind != "start again":
            loader.load_state_dict(own["loader"])
    while step < spec.steps(len(loader)):
        batches = iter(loader)
        while rows := list(islice(batches, spec.accumulation)):
            torch.manual_seed(step * spec.world_size + spec.rank)
            targets = step_targets(rows)
            for row in rows:
                inputs = broken(spec.kind, row.transformers_inputs(), len(recorder))
                if spec.kind == "mean of means":
                    targets = (inputs["labels"][:, 1:] != -100).sum().clamp(min=1) * len(rows)
                loss = model(**inputs | {"num_items_in_batch": targets}).loss
                recorder.record(inputs, float(loss) * float(targets))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            parts: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            parts |= {"loader": loader.state_dict(), "step": step}
            torch.save(parts, folder / f"{step}-{spec.rank}.pt")
    recorder.finish(model.state_dict())


def latest(folder: Path) -> int:
    """The last step that both ranks have saved; a killed rank may have saved fewer steps."""
    saved = [{int(file.name.split("-")[0]) for file in folder.glob(f"*-{rank}.pt")} for rank in (0, 1)]
    return max(saved[0] & saved[1])


def broken(kind: str, inputs: dict[str, Any], number: int) -> dict[str, Any]:
    """The arguments of the model with an error in row `number`."""
    if kind == "shifted labels":
        inputs["labels"] = torch.cat([inputs["labels"][:, 1:], inputs["labels"][:, :1]], dim=1)
    elif kind == "leaked attention" and number == 3:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    elif kind == "lost sample" and number == 4:
        end = int(inputs["cu_seq_lens_q"][1])
        return {name: inputs[name][:, end:] for name in ("input_ids", "labels", "position_ids")}
    return inputs


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
