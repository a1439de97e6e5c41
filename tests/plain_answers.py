"""Plain transformers, without this program: reads requests from its input and writes the answers of the model in a
folder, the first argument.
"""

import json
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """A request has `messages` and perhaps `tools`, which the chat template renders, or a `text`."""
    folder, answers = sys.argv[1], []
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for request in json.load(sys.stdin):
        if "text" in request:
            inputs = tokenizer(request["text"], return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                request["messages"],
                tools=request.get("tools"),
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        prompt = inputs["input_ids"][0].tolist()
        out = model.generate(**inputs, do_sample=False, max_new_tokens=40)[0, len(prompt) :]
        answers.append({"prompt": prompt, "prompt_text": tokenizer.decode(prompt), "answer": tokenizer.decode(out)})
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
