"""How the faults are caused that the patterns of agent/patterns.toml know: a small program for each; causing.py runs them.

A fault that needs a GPU, a full machine or another version is not here: its log is written from the documented wording.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

_TOKENIZER = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
inner = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
"""
_MODEL = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
config = LlamaConfig(vocab_size=32, max_position_embeddings=64, architectures=["LlamaForCausalLM"], **sizes)
"""
_GROUP = """
import os, torch, torch.distributed as dist, datetime
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
from torch.nn.parallel import DistributedDataParallel
"""
_TWO_RANKS = """
import datetime, os, signal, sys, time, torch, torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
if len(sys.argv) == 1:
    import subprocess
    other = subprocess.Popen([sys.executable, __file__, "1"], stderr=subprocess.DEVNULL)
rank = 1 if len(sys.argv) > 1 else 0
store = dist.FileStore("meeting", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=90))
dist.barrier()
group = dist.new_group(timeout=datetime.timedelta(seconds=2))
dist.all_reduce(torch.ones(1), group=group)
if rank:
    {other}
try:
    dist.all_reduce(torch.ones(1), group=group)
finally:
    other.kill()
"""
_TEMPLATE = (
    "tokenizer.chat_template = {template!r}\ntokenizer.apply_chat_template({turns!r}, tokenize=False)\n"
)


@dataclass(frozen=True)
class Cause:
    """How a fault is caused: a Python program, or a command of the shell; it runs in an empty folder."""

    code: str
    is_shell: bool = False
    environ: dict[str, str] = field(default_factory=dict)


def _template(template: str, *roles: str) -> Cause:
    turns = [{"role": role, "content": "a"} for role in roles]
    return Cause(_TOKENIZER + _TEMPLATE.format(template=template, turns=turns))


def _box(arguments: str, code: str) -> Cause:
    """A Python program under bubblewrap."""
    python = f"{sys.executable} box.py"
    return Cause(f"cat > box.py <<'END'\n{code}\nEND\nbwrap {arguments} {python}", is_shell=True)


CAUSES: dict[str, Cause] = {
    "rows_disagree": Cause(
        """
from datasets import load_dataset
open("a.jsonl", "w").write('{"prompt": "a", "answer": 1}')
open("b.jsonl", "w").write('{"prompt": "a", "target": 1}')
load_dataset("json", data_files=["a.jsonl", "b.jsonl"])
"""
    ),
    "no_parquet": Cause(
        """
import pyarrow.parquet
open("rows.parquet", "w").write("version https://git-lfs.github.com/spec/v1")
pyarrow.parquet.read_table("rows.parquet")
"""
    ),
    "not_utf8": Cause(
        """
open("rows.jsonl", "w", encoding="latin1").write('{"text": "caf\\u00e9"}')
print(open("rows.jsonl", encoding="utf-8").read())
"""
    ),
    "json_broken": Cause("""import json\njson.loads('{"prompt": "a", "completion": }')\n"""),
    "verifier_gets_messages": Cause(
        """
def score(row, completion):
    return float(completion[0]["content"] == row["answer"])
score({"answer": "4"}, "4")
"""
    ),
    "roles_alternate": _template(
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
        "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% endfor %}",
        "user",
        "user",
    ),
    "no_system_role": _template(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
        "system",
        "user",
    ),
    "template_syntax": _template("{% for m in messages %}{{ m['content'] }}", "user"),
    "template_failed": _template("{{ messages[0]['value'] + '\\n' }}", "user"),
    "no_template": Cause(
        _TOKENIZER + "tokenizer.apply_chat_template([{'role': 'user', 'content': 'a'}], tokenize=False)\n"
    ),
    "no_pad_token": Cause(_TOKENIZER + "tokenizer(['a', 'a a'], padding=True)\n"),
    "tokenizer_class": Cause(
        _MODEL
        + "config.save_pretrained('model')\nfrom transformers import AutoTokenizer\nAutoTokenizer.from_pretrained('./model')\n"
    ),
    "token_past_embedding": Cause(
        "import torch\nembedding = torch.nn.Embedding(32, 4)\nembedding(torch.tensor([32]))\n"
    ),
    "weights_truncated": Cause(
        """
import torch
from safetensors.torch import load_file, save_file
save_file({"weight": torch.ones(64)}, "model.safetensors")
whole = open("model.safetensors", "rb").read()
open("model.safetensors", "wb").write(whole[:-100])
load_file("model.safetensors")
"""
    ),
    "pickled_weights": Cause(
        """
import torch
class Own:
    pass
torch.save(Own(), "pytorch_model.bin")
torch.load("pytorch_model.bin")
"""
    ),
    "own_code": Cause(
        """
import json, os
os.mkdir("model")
own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
json.dump(own, open("model/config.json", "w"))
from transformers import AutoConfig
AutoConfig.from_pretrained("./model", trust_remote_code=False)
"""
    ),
    "unknown_architecture": Cause(
        """
import json, os
os.mkdir("model")
json.dump({"model_type": "newest"}, open("model/config.json", "w"))
from transformers import AutoConfig
AutoConfig.from_pretrained("./model")
"""
    ),
    "adapter_shapes": Cause(
        _MODEL
        + """
from peft import LoraConfig, PeftModel, get_peft_model
lora = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
get_peft_model(AutoModelForCausalLM.from_config(config), lora).save_pretrained("adapter")
config.hidden_size = 32
PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config), "adapter")
"""
    ),
    "adapter_targets": Cause(
        _MODEL
        + """
from peft import LoraConfig, get_peft_model
get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(target_modules=["query_key_value"]))
"""
    ),
    "config_missing": Cause(
        "from transformers import AutoConfig\nAutoConfig.from_pretrained('/nowhere/model')\n"
    ),
    "no_access": Cause(
        """
import os, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model me/gated is restricted.")
        self.end_headers()
    do_GET = do_HEAD
    def log_message(self, *rest):
        pass
server = HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
from huggingface_hub import model_info
model_info("me/gated")
"""
    ),
    "certificate": Cause(
        """
import ssl, subprocess, threading
from http.server import HTTPServer, BaseHTTPRequestHandler
make = "openssl req -x509 -newkey rsa:2048 -nodes -days 9 -subj /CN=localhost -keyout key.pem -out cert.pem"
subprocess.run(make.split(), check=True, capture_output=True)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("cert.pem", "key.pem")
server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
server.socket = context.wrap_socket(server.socket, server_side=True)
threading.Thread(target=server.handle_request, daemon=True).start()
import httpx
httpx.get(f"https://localhost:{server.server_port}", trust_env=False)
"""
    ),
    "other_torch": Cause(
        """
import ctypes, os, subprocess
open("own.c", "w").write("void at_of_another_torch(void); void run(void) { at_of_another_torch(); }")
subprocess.run(["gcc", "-shared", "-fPIC", "-o", "own_cuda.so", "own.c"], check=True)
ctypes.CDLL("./own_cuda.so", os.RTLD_NOW)
"""
    ),
    "no_network": Cause(
        "from huggingface_hub import hf_hub_download\nhf_hub_download('me/model', 'config.json')\n",
        environ={"HF_HUB_OFFLINE": "1"},
    ),
    "port_taken": Cause(
        """
import socket, torch.distributed as dist
holder = socket.create_server(("127.0.0.1", 0))
port = holder.getsockname()[1]
dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True)
"""
    ),
    "lora_rank": Cause(
        """
from types import SimpleNamespace
from vllm.lora.peft_helper import PEFTHelper
helper = PEFTHelper(r=32, lora_alpha=32, target_modules=["q_proj"])
helper.validate_legal(SimpleNamespace(max_lora_rank=16, bias_enabled=False))
"""
    ),
    "lora_weights": Cause(
        """
from vllm.lora.utils import parse_fine_tuned_lora_name
parse_fine_tuned_lora_name("base_model.model.lm_head.weight")
"""
    ),
    "flash_attention": Cause(
        _MODEL + "AutoModelForCausalLM.from_config(config, attn_implementation='flash_attention_2')\n"
    ),
    "library_missing": Cause("import ctypes\nctypes.CDLL('libcudart.so.12')\n"),
    "other_version": Cause("from transformers import AutoModelForVision2SeqGeneration\n"),
    "unknown_keyword": Cause(_MODEL + "AutoModelForCausalLM.from_config(config, use_flash=True)\n"),
    "no_module": Cause("import tensorboard_of_another\n"),
    "sandbox_refused": Cause(
        "unshare -Ur sh -c 'echo 0 > /proc/sys/user/max_user_namespaces; bwrap --unshare-user --ro-bind / / true'",
        is_shell=True,
    ),
    "sandbox_path": Cause("bwrap --ro-bind /nowhere /nowhere true", is_shell=True),
    "read_only": _box("--ro-bind / / --dev /dev", "open('adapter_model.safetensors', 'wb')"),
    "frozen_inputs": Cause("import torch\ntorch.ones(2).sum().backward()\n"),
    "unused_parameter": Cause(
        _GROUP
        + """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.used(x)
model = DistributedDataParallel(Model())
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
"""
    ),
    "disk_full": _box(
        "--bind / / --dev /dev --proc /proc --size 1048576 --tmpfs /mnt",
        "with open('/mnt/optimizer.pt', 'wb') as file:\n    file.write(bytes(10**7))",
    ),
    "file_limit": Cause(
        """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with open("optimizer.pt", "wb") as file:
    file.write(bytes(10**5))
"""
    ),
    "open_files": Cause(
        """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
held = [open("/etc/hostname") for _ in range(32)]
"""
    ),
    "threads": Cause(
        """
import os, resource, threading, time
os.setgid(61234)
os.setuid(61234)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
threading.Thread(target=time.sleep, args=(1,)).start()
"""
    ),
    "cpu_build": Cause("import torch\ntorch.ones(1).to('cuda')\n"),
    "shared_memory": _box(
        "--bind / / --dev /dev --proc /proc --size 1048576 --tmpfs /dev/shm",
        """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    for batch in DataLoader([torch.ones(10**6)] * 4, batch_size=2, num_workers=1):
        pass""",
    ),
    "memory": Cause("import torch\ntorch.empty(2**48)\n"),
    "crashed": Cause("import faulthandler, ctypes\nfaulthandler.enable()\nctypes.string_at(0)\n"),
    "interface": Cause(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n",
        environ={"GLOO_SOCKET_IFNAME": "eth7"},
    ),
    "never_met": Cause(
        """
import datetime, torch.distributed as dist
dist.TCPStore("127.0.0.1", 9, world_size=2, is_master=False, timeout=datetime.timedelta(seconds=2))
"""
    ),
    "waited_in_vain": Cause(_TWO_RANKS.format(other="time.sleep(30)")),
    "peer_gone": Cause(_TWO_RANKS.format(other="os.kill(os.getpid(), signal.SIGKILL)")),
    "killed": Cause(
        """
import os, signal, torch.multiprocessing as mp
def work(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
    ),
    "interrupted": Cause("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n"),
}
