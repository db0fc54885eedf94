"""Time to first token and images a second of a whole vLLM, without the plugin and with it.

    python -m tests.vllm.served FOLDER 448 1344       Qwen2.5-VL 7B, random weights, few words
    python -m tests.vllm.served FOLDER 112 --tiny     three layers, to try this on a CPU

`vllm bench serve` asks `vllm serve` for a word about a square image each, one after the other and
16 at a time. Result files and logs go to FOLDER, and a table to the standard output.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.vllm import checkpoints

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
PORT = "8123"
# By what is measured: prompts, and how many at a time.
LOADS = {"one by one": (20, 1), "16 at a time": (64, 16)}


def serve(checkpoint, log, plugin):
    command = [
        *(*VLLM, "serve", checkpoint, "--port", PORT, "--load-format", "dummy"),
        *("--max-model-len", "4096", "--max-num-seqs", "16", "--dtype", "bfloat16"),
        *("--limit-mm-per-prompt", '{"image": 1, "video": 0}'),
        *("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"),
    ]
    environment = os.environ | {"FUSED_ROPE_VLLM": plugin}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def wait(server):
    """Until a server answers; one that has ended won't."""
    while server.poll() is None:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health").close()
        except OSError:
            time.sleep(1)
    sys.exit("The server has ended: see its log")


def measure(checkpoint, side, load, file):
    prompts, at_a_time = LOADS[load]
    command = [
        *(*VLLM, "bench", "serve", "--model", checkpoint, "--port", PORT, "--disable-tqdm"),
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--num-prompts", prompts, "--max-concurrency", at_a_time, "--num-warmups", 2),
        *("--dataset-name", "random-mm", "--random-input-len", 32, "--random-output-len", 1),
        *("--random-mm-base-items-per-request", 1, "--random-mm-num-mm-items-range-ratio", 0),
        *("--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}', "--ignore-eos"),
        *("--random-mm-bucket-config", f"{{({side}, {side}, 1): 1.0}}"),
        *("--save-result", "--result-dir", file.parent, "--result-filename", file.name),
    ]
    with file.with_suffix(".log").open("w") as log:
        subprocess.run(list(map(str, command)), check=True, stdout=log, stderr=subprocess.STDOUT)
    return json.loads(file.read_text())


def main(arguments):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sides", type=int, nargs="+")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    checkpoint = folder / "checkpoint"
    if options.tiny:
        checkpoints.save("Qwen2_5_VL", checkpoint)
    else:
        checkpoints.save_without_weights(checkpoint)
    print("| image, requests | FUSED_ROPE_VLLM | time to first token, ms | images/s |")
    print("| --- | --- | --- | --- |")
    for plugin in ("0", "attention,norm,mlp"):
        name = "vllm" if plugin == "0" else "ours"
        with (folder / f"server-{name}.log").open("w") as log:
            server = serve(checkpoint, log, plugin)
            try:
                wait(server)
                for side in options.sides:
                    for load in LOADS:
                        file = folder / f"{name}-{side}-{LOADS[load][1]}.json"
                        found = measure(checkpoint, side, load, file)
                        if found["failed"]:
                            sys.exit(f"{found['failed']} requests failed: see {file}")
                        numbers = found["median_ttft_ms"], found["request_throughput"]
                        cells = f"{side} px, {load}", plugin, *(f"{x:.1f}" for x in numbers)
                        print(f"| {' | '.join(cells)} |", flush=True)
            finally:
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
