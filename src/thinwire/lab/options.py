"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from thinwire.lab.tasks import TASKS

Task = Annotated[str, typer.Option("--task", help=f"{', '.join(TASKS)}, or my_module:make_task")]
Model = Annotated[str | None, typer.Option("--model", "--size", help="the task's net: mlp, cnn, 10M, resnet20, ...")]
Workers = Annotated[int, typer.Option(help="processes on this machine; under torchrun, as many as it started")]
Steps = Annotated[int | None, typer.Option(help="the task says, if you do not")]
Batch = Annotated[int | None, typer.Option(help="samples a worker takes a step")]
Optimizer = Annotated[str | None, typer.Option(help="sgd or adamw")]
Rate = Annotated[float | None, typer.Option("--lr", help="learning rate")]
Momentum = Annotated[float, typer.Option(help="of sgd")]
Decay = Annotated[float, typer.Option("--weight-decay")]
Schedule = Annotated[str, typer.Option(help="of the learning rate: constant, cosine or linear")]
Seed = Annotated[int, typer.Option(help="decides weights and data order")]
Grain = Annotated[str | None, typer.Option(help="what a method sees at once: tensor, bucket or model")]
Overlap = Annotated[bool | None, typer.Option("--overlap/--no-overlap", help="exchange beside the backward pass")]
Evaluate = Annotated[int | None, typer.Option("--evaluate-every", help="steps; a twentieth of the run if not given")]
Checkpoint = Annotated[int, typer.Option("--checkpoint-every", help="steps; 0 writes none")]
Link = Annotated[str | None, typer.Option(help="emulate a link: 10mbit, 100mbit, 1gbit, ...")]
Rtt = Annotated[str | None, typer.Option(help="with a round trip of: 1ms, 40ms, ...")]
Data = Annotated[Path | None, typer.Option(help="where data sets are kept; a cache folder if not given")]
Out = Annotated[Path | None, typer.Option(help="folder to write to; a new one under runs/ if not given")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with what is in --out")]
Port = Annotated[int | None, typer.Option(help="for the workers to meet at; a free one is found if not given")]
Methods = Annotated[list[str] | None, typer.Option("--method", help="a method's spelling; may be given many times")]
