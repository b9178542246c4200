"""`buddy eval`: the table of measurements."""

import typer

from buddy.cli.command import Command
from buddy.lab.cli.commands.eval_answers import answers
from buddy.lab.cli.commands.eval_ppl import ppl
from buddy.lab.cli.commands.eval_rouge import rouge
from buddy.lab.cli.commands.eval_tasks import gsm8k, mmlu, tasks

evaluate = typer.Typer(help="Measure a model under budgets, into RunRecords.")
evaluate.command()(tasks)
evaluate.command()(ppl)
evaluate.command()(answers)
evaluate.command()(gsm8k)
evaluate.command()(mmlu)
evaluate.command()(rouge)


COMMAND = Command(name="eval", group="measure", place=4, run=evaluate, shares=True)
