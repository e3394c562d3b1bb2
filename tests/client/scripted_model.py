"""A Triton Python model that speaks the wire contract without any language model.

The prompt is the script.  Plain text is echoed word by word; a JSON object says what to do:

    {"tokens": 5, "delay": 0.02}                     five tokens, 20 ms apart
    {"tokens": 3, "code": "INTERNAL", "error": "x"}  three tokens, then an error
    {"key": "k", "fail_times": 2, "code": ...}       the error for the first two requests of "k"
    {"first_after": 0.5}                             that long before the first token; vectors only
    {"key": "k", "held": true}                       no token before `{"report": "k", "release": true}`
    {"late_final": true}                             the FINAL flag without data
    {"no_deadline": true}                            ignores the request's timeout
    {"report": "k"}                                  answers with what was seen under "k", as JSON

`pooling` is answered with one response: embeddings [length of the input, 0.5], scores a hundredth of the document's
length, probabilities of "bad" and "good"; a character is a token.  A first input that begins with "{" is a script.

The request parameter `control` is answered with its value; "refused" is refused.  This file runs in
Triton's stub, so it imports nothing of the project or its tests.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FLAGS = {
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_logprobs",
    "return_cumulative_logprob",
    "return_token_ids",
}
INPUTS = [
    ("text_input", "TYPE_STRING", [1]),
    ("stream", "TYPE_BOOL", [1]),
    ("sampling_parameters", "TYPE_STRING", [1]),
    ("exclude_input_in_output", "TYPE_BOOL", [1]),
    *((flag, "TYPE_BOOL", [1]) for flag in sorted(FLAGS)),
    ("input_ids", "TYPE_INT64", [-1]),
    ("messages", "TYPE_STRING", [1]),
    ("request_priority", "TYPE_INT32", [1]),
    ("tenant", "TYPE_STRING", [1]),
    ("cache_salt", "TYPE_STRING", [1]),
    ("pooling", "TYPE_STRING", [1]),
]
OUTPUTS = [
    ("text_output", "TYPE_STRING", np.object_),
    ("finish_reason", "TYPE_STRING", np.object_),
    ("token_ids", "TYPE_INT64", np.int64),
    ("token_counts", "TYPE_UINT32", np.uint32),
    ("num_input_tokens", "TYPE_UINT32", np.uint32),
    ("num_output_tokens", "TYPE_UINT32", np.uint32),
    ("cumulative_logprob", "TYPE_FP32", np.float32),
    ("logprobs", "TYPE_STRING", np.object_),
    ("prompt_logprobs", "TYPE_STRING", np.object_),
    ("pooled", "TYPE_FP32", np.float32),
    ("pooled_token_counts", "TYPE_INT32", np.int32),
    ("labels", "TYPE_STRING", np.object_),
]
DTYPES = {name: dtype for name, _, dtype in OUTPUTS}
COUNTS = ("requests", "running", "peak", "finished", "cancelled", "failed", "expired")
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def plain(tensor):
    """A tensor's value for JSON; a single element is unwrapped."""
    values = [v.decode() if isinstance(v, bytes) else v.item() for v in tensor.as_numpy().reshape(-1)]
    return values if tensor.name() == "input_ids" else values[0]


def error(code, message):
    return pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(0)
        for name, data_type, dims in INPUTS:
            config.add_input({"name": name, "data_type": data_type, "dims": dims, "optional": True})
        for name, data_type, _ in OUTPUTS:
            dims = [-1, -1] if name == "pooled" else [-1]
            config.add_output({"name": name, "data_type": data_type, "dims": dims})
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args):
        self.lock = threading.Lock()
        self.seen = {}
        self.released = set()

    def execute(self, requests):
        for request in requests:
            inputs = {tensor.name(): plain(tensor) for tensor in request.inputs()}
            inputs["request_id"] = request.request_id()
            inputs["parameters"] = json.loads(request.parameters() or "{}")
            inputs["timeout"] = request.timeout() or inputs["parameters"].get("timeout", 0)
            threading.Thread(target=self.answer, args=(request.get_response_sender(), inputs), daemon=True).start()

    def answer(self, sender, inputs):
        if "control" in inputs["parameters"]:
            self.control(sender, inputs["parameters"]["control"])
            return
        params = json.loads(inputs.get("sampling_parameters", "{}"))
        script = self.script_of(inputs, params)
        with self.lock:
            seen = self.seen.setdefault(script.get("key", ""), dict.fromkeys(COUNTS, 0))
            if "report" in script:
                if script.get("release"):
                    self.released.add(script["report"])
                self.report(sender, self.seen.get(script["report"], {}))
                return
            seen["requests"] += 1
            seen["running"] += 1
            seen["peak"] = max(seen["peak"], seen["running"])
            seen["inputs"] = inputs
        failing = seen["requests"] <= script["fail_times"] if "fail_times" in script else "error" in script
        if params.get("temperature", 1) < 0:
            script, failing = (
                {"code": "INVALID_ARG", "error": "temperature=-1 is out of range: allowed is [0, 100]"},
                True,
            )
        if failing and "fail_times" in script:
            script["words"] = []
        answer = self.pool if "pooling" in inputs else self.stream
        outcome = answer(sender, script, inputs, params, failing)
        with self.lock:
            seen[outcome] += 1
            seen["running"] -= 1

    def script_of(self, inputs, params):
        text = inputs.get("text_input", "")
        if "pooling" in inputs:
            first = json.loads(inputs["pooling"])["inputs"][0]
            text = first if isinstance(first, str) else ""
        if "messages" in inputs:
            text = " ".join(f"{m['role']}:{m['content']}" for m in json.loads(inputs["messages"]))
        if "input_ids" in inputs:
            text = " ".join(str(i) for i in inputs["input_ids"])
        script = json.loads(text) if text.startswith("{") else {"words": text.split(" ")}
        script.setdefault("words", [f"t{i}" for i in range(script.get("tokens", 0))])
        limit = params.get("max_tokens", 16)
        script["ends"] = "length" if len(script["words"]) > limit else "stop"
        script["words"] = script["words"][:limit]
        return script

    def control(self, sender, name):
        if name == "refused":
            problem = error("INVALID_ARG", "control='refused' is not supported")
            sender.send(pb_utils.InferenceResponse(error=problem), flags=FINAL)
            return
        text = pb_utils.Tensor("text_output", np.array([f"answer to {name}"], dtype=np.object_))
        sender.send(pb_utils.InferenceResponse([text]), flags=FINAL)

    def report(self, sender, seen):
        text = np.array([json.dumps(seen)], dtype=np.object_)
        reason = np.array(["stop"], dtype=np.object_)
        tensors = [pb_utils.Tensor("text_output", text), pb_utils.Tensor("finish_reason", reason)]
        sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL)

    def stream(self, sender, script, inputs, params, failing):
        timeout = 0 if script.get("no_deadline") else inputs["timeout"]
        deadline = time.monotonic() + timeout / 1e6 if timeout else None
        while script.get("held") and script["key"] not in self.released:
            time.sleep(0.005)
        words, n = script.get("words", []), params.get("n", 1)
        at_once = not inputs.get("stream", False) and not failing
        for i, word in enumerate(words):
            if sender.is_cancelled():
                sender.send(flags=FINAL)
                return "cancelled"
            # A busy machine may be late before the first token; tests look at two of them.
            if i > 1 and deadline is not None and time.monotonic() > deadline:
                problem = error("CANCELLED", f"deadline exceeded: timeout of {timeout} us has passed")
                sender.send(pb_utils.InferenceResponse(error=problem), flags=FINAL)
                return "expired"
            last = i == len(words) - 1 and not failing
            if not at_once:
                outputs = self.outputs(inputs, params, n, [word], i, script["ends"] if last else None)
                sender.send(outputs, flags=FINAL if last and not script.get("late_final") else 0)
            time.sleep(script.get("delay", 0))
        if failing:
            problem = error(script.get("code", "INTERNAL"), script["error"])
            sender.send(pb_utils.InferenceResponse(error=problem), flags=FINAL)
            return "failed"
        if at_once:
            sender.send(self.outputs(inputs, params, n, words, 0, script["ends"]), flags=FINAL)
        elif script.get("late_final"):
            sender.send(flags=FINAL)
        return "finished"

    def pool(self, sender, script, inputs, params, failing):
        for _ in range(int(script.get("first_after", 0) * 100)):
            time.sleep(0.01)
            if sender.is_cancelled():
                sender.send(flags=FINAL)
                return "cancelled"
        if failing:
            problem = error(script.get("code", "INTERNAL"), script["error"])
            sender.send(pb_utils.InferenceResponse(error=problem), flags=FINAL)
            return "failed"
        pooling = json.loads(inputs["pooling"])
        rows = {
            "embed": lambda one: [len(one), 0.5],
            "score": lambda one: [len(one[1]) / 100],
            "classify": lambda one: [0.25, 0.75] if "g" in one else [0.75, 0.25],
        }
        lengths = [sum(map(len, one)) if pooling["task"] == "score" else len(one) for one in pooling["inputs"]]
        columns = {
            "pooled": [rows[pooling["task"]](one) for one in pooling["inputs"]],
            "pooled_token_counts": lengths,
        }
        if pooling["task"] == "classify":
            columns["labels"] = ["bad", "good"]
        tensors = [pb_utils.Tensor(name, np.array(column, dtype=DTYPES[name])) for name, column in columns.items()]
        sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL)
        return "finished"

    def outputs(self, inputs, params, n, words, start, ends):
        """A response with `words` for each of the n sequences, numbered from `start`."""
        count = len(words)
        text = "".join(word if start + i == 0 else f" {word}" for i, word in enumerate(words))
        columns = {"text_output": [text] * n}
        if inputs.get("return_finish_reason"):
            columns["finish_reason"] = [str(ends)] * n
        if inputs.get("return_num_input_tokens"):
            columns["num_input_tokens"] = [7]
        if inputs.get("return_num_output_tokens"):
            columns["num_output_tokens"] = [count] * n
        if inputs.get("return_cumulative_logprob"):
            columns["cumulative_logprob"] = [-0.5 * (start + count)] * n
        if inputs.get("return_token_ids"):
            columns["token_ids"] = [1000 * s + start + i for s in range(n) for i in range(count)]
            if n > 1:
                columns["token_counts"] = [count] * n
        if inputs.get("return_logprobs"):
            entry = [{str(start + i): {"logprob": -0.5, "rank": 1, "decoded_token": w}} for i, w in enumerate(words)]
            columns["logprobs"] = [json.dumps(entry)] * n
        if "prompt_logprobs" in params and start == 0:
            columns["prompt_logprobs"] = [json.dumps([None, {"5": {"logprob": -1.0, "rank": 2}}])]
        tensors = [pb_utils.Tensor(name, np.array(column, dtype=DTYPES[name])) for name, column in columns.items()]
        return pb_utils.InferenceResponse(tensors)
