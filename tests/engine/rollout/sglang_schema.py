"""Read the fields of SGLang's request classes and the classes of its paths from its sources.

Nothing is imported: its modules need a GPU. `python -m tests.engine.rollout.sglang_schema FOLDER`
prints what `sglang-VERSION.json` holds, where FOLDER is an unpacked wheel.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

REQUESTS = {
    "/generate": "GenerateReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
}
BODILESS = ("/flush_cache", "/model_info", "/server_info")


def read_schema(folder):
    """Return fields (name -> annotation, whether required) by path, and the sampling fields."""
    source = Path(folder) / "sglang" / "srt"
    records = classes_of(source / "managers" / "io_struct.py")
    sampling = classes_of(source / "sampling" / "sampling_params.py")["SamplingParams"]
    routes = (source / "entrypoints" / "http_server.py").read_text()
    missing = [path for path in (*REQUESTS, *BODILESS) if f'"{path}"' not in routes]
    return {
        "requests": {path: fields_of(records[name]) for path, name in REQUESTS.items()},
        "sampling_params": fields_of(sampling),
        "missing_paths": missing,
    }


def classes_of(path):
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def fields_of(node):
    return {
        item.target.id: {"type": ast.unparse(item.annotation), "required": item.value is None}
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


if __name__ == "__main__":
    json.dump(read_schema(sys.argv[1]), sys.stdout, indent=1)
    sys.stdout.write("\n")
