"""`python -m ds_finetune.transformers_server FOLDER ...`: `transformers serve` over a folder of either kind, which samples as a request says.

transformers 5.23 draws nothing where generation_config.json does not say `do_sample`, whatever `temperature` and `top_p` a request has
(cli/serving/utils.py:1181), and looks a model's class up by the `architectures` of config.json (cli/serving/model_manager.py:284:
`getattr(transformers, config.architectures[0]).from_pretrained(...)`): what stands there here loads the folder and sets that.
"""

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve sys.argv[1] with the further arguments of `transformers serve`."""
    import transformers
    from transformers.cli.transformers import main as serve

    folder, *further = sys.argv[1:]
    architecture = transformers.AutoConfig.from_pretrained(Path(folder), trust_remote_code=False).architectures[0]
    setattr(transformers, architecture, _Loader(getattr(transformers, architecture)))
    sys.argv = ["transformers", "serve", folder, *further]
    serve()


class _Loader:
    """Stands in for a model's class while a server loads it."""

    def __init__(self, plain: Any) -> None:  # noqa: ANN401 - a class of transformers
        self._plain = plain

    def from_pretrained(self, folder: str, **how: Any) -> Any:  # noqa: ANN401 - a model of transformers
        """The model, of an ONNX folder in ONNX Runtime. Where neither folder nor request say else it draws with temperature 1 from all tokens."""
        from ds_finetune.export.record import is_onnx

        if is_onnx(Path(folder)):
            from ds_finetune.export.onnx_model import OnnxCausalLM

            model: Any = OnnxCausalLM.from_pretrained(folder)
        else:
            model = self._plain.from_pretrained(folder, **how)
        settings = model.generation_config
        settings.do_sample = True if settings.do_sample is None else settings.do_sample
        settings.top_k = 0 if settings.top_k is None else settings.top_k
        return model


if __name__ == "__main__":
    main()
