"""Runs in the environment of the judges' programs: prints, as JSON, what their readers find in files of answers.

read_answers.py alpaca_eval ANSWERS REFERENCES FOLDER
read_answers.py mt_bench QUESTIONS FOLDER_OF_ANSWERS
"""

import json
import sys
import types
from pathlib import Path

CONFIG = """
local:
  prompt_template: {prompt}
  fn_completions: local
  completions_kwargs: {{}}
  fn_completion_parser: regex_parser
  completion_parser_kwargs:
    outputs_to_match: {{1: "1", 2: "2"}}
  batch_size: 1
"""


def alpaca_eval(answers: str, references: str, folder: str) -> object:
    """The whole of `alpaca_eval.evaluate`, but for the judge: the longer answer wins."""
    from alpaca_eval import evaluate
    from alpaca_eval.annotators import base

    def judge(prompts, **_):
        pairs = [prompt.split("|||") for prompt in prompts]
        said = ["1" if len(first) > len(second) else "2" for first, second in pairs]
        return {"completions": said, "price_per_example": [0] * len(said), "time_per_example": [0] * len(said)}

    base.get_fn_completions = lambda name: judge
    prompt, config = Path(folder) / "prompt.txt", Path(folder) / "config.yaml"
    prompt.write_text("{output_1}|||{output_2}")
    config.write_text(CONFIG.format(prompt=prompt))
    board, pairs = evaluate(
        model_outputs=answers, reference_outputs=references, annotators_config=str(config), output_path=None,
        precomputed_leaderboard=None, is_return_instead_of_print=True, fn_metric="get_winrate", sort_by="win_rate",
        caching_path=None,
    )  # fmt: skip
    fields = ("instruction", "output_1", "output_2", "generator_1", "generator_2", "dataset", "preference")
    return {"board": board.to_dict("index"), "pairs": [[pair[field] for field in fields] for pair in pairs]}


def mt_bench(questions: str, folder: str) -> object:
    """The matches, of one turn and of two, that FastChat would show to a judge."""
    # FastChat reads the judges' names here, and imports torch and transformers for it.
    adapter = types.ModuleType("fastchat.model.model_adapter")
    adapter.load_model = adapter.get_conversation_template = adapter.add_model_args = None
    adapter.ANTHROPIC_MODEL_LIST = adapter.OPENAI_MODEL_LIST = ()
    sys.modules[adapter.__name__] = adapter
    from fastchat.llm_judge.common import Judge, load_model_answers, load_questions
    from fastchat.llm_judge.gen_judgment import make_match_single

    asked, answers, judge = load_questions(questions, None, None), load_model_answers(folder), Judge("local", {})
    matches = [make_match_single(asked, list(answers), answers, judge, multi_turn=several) for several in (False, True)]
    return [
        [[m.question["question_id"], m.model, m.answer["choices"][0]["turns"], m.answer["model_id"]] for m in found]
        for found in matches
    ]


if __name__ == "__main__":
    found = {"alpaca_eval": alpaca_eval, "mt_bench": mt_bench}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(json.dumps(found) + "\n")
