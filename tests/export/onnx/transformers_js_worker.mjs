// transformers.js: a folder, a number of tokens, and prompts as JSON; prints the tokens that follow each greedily.
import { AutoModelForCausalLM, Tensor } from "@huggingface/transformers";

const [folder, count, prompts] = [process.argv[2], Number(process.argv[3]), JSON.parse(process.argv[4])];
// "fp32" is the file without a suffix, whatever its weights are.
const model = await AutoModelForCausalLM.from_pretrained(folder, { dtype: "fp32", local_files_only: true });
const answers = [];
for (const ids of prompts) {
  const tensor = (values) => new Tensor("int64", BigInt64Array.from(values, BigInt), [1, ids.length]);
  const inputs = { input_ids: tensor(ids), attention_mask: tensor(ids.map(() => 1)) };
  const made = await model.generate({ ...inputs, max_new_tokens: count, min_new_tokens: count, do_sample: false });
  answers.push(Array.from(made.data, Number).slice(ids.length));
}
console.log(JSON.stringify(answers));
