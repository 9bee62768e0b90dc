"""llama.cpp's own HTTP server, out of the xllamacpp wheel, until SIGTERM: MODEL PORT DIRECTORY-FOR-SAVED-SLOTS."""

import signal
import sys
import threading

import xllamacpp

model, port, saved = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.model_alias = {"tiny"} if isinstance(params.model_alias, set) else "tiny"
params.slot_save_path = saved + "/"  # without it slots cannot be erased
params.hostnames = ["127.0.0.1"]
params.port = int(port)
params.n_ctx = 4096
params.n_parallel = 4
params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
params.warmup = False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
ended.wait()
