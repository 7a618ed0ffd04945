// A simulator that a Coterie run acts on, in JavaScript: docs/reference/wire.md in code. `npm install` here first.
// Eight CartPoles share one stream: each data frame has all of them, each answer an action for each.
"use strict";
const crypto = require("crypto");
const fs = require("fs");
const path = require("path");
const { parseArgs } = require("util");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const ENVS = 8;
const SILENCE_MS = 30000;
const SENDS = [
  ["reward", "float32", [ENVS]],
  ["terminated", "bool", [ENVS]],
  ["truncated", "bool", [ENVS]],
  ["is_first", "bool", [ENVS]],
  ["episode_return", "float64", [ENVS]],
  ["episode_length", "float64", [ENVS]],
  ["obs/", "float32", [ENVS, 4]],
].map(([name, dtype, shape]) => ({ name, dtype, shape }));
const ARRAYS = { float32: Float32Array, float64: Float64Array, bool: Uint8Array };

// Gymnasium's CartPole-v1.
class CartPole {
  constructor() {
    this.ended = true;
    this.step(0);
  }

  step(action) {
    const first = this.ended; // a reset step: the action is ignored, and the reward is 0
    if (first) {
      this.state = Array.from({ length: 4 }, () => Math.random() * 0.1 - 0.05);
      this.length = 0;
    } else {
      const [x, speed, angle, spin] = this.state;
      const [sin, cos] = [Math.sin(angle), Math.cos(angle)];
      const push = ((action === 1 ? 10 : -10) + 0.05 * spin * spin * sin) / 1.1;
      const turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - (0.1 * cos * cos) / 1.1));
      const change = [speed, push - (0.05 * turn * cos) / 1.1, spin, turn];
      this.state = [x, speed, angle, spin].map((value, i) => value + 0.02 * change[i]);
      this.length += 1;
    }
    const fell = Math.abs(this.state[0]) > 2.4 || Math.abs(this.state[2]) > (12 * Math.PI) / 180;
    const late = !fell && this.length === 500;
    this.ended = fell || late;
    const told = this.ended ? this.length : NaN; // each step earns 1: the return is the length
    this.seen = { reward: first ? 0 : 1, terminated: fell, truncated: late, is_first: first };
    Object.assign(this.seen, { episode_return: told, episode_length: told, "obs/": this.state });
  }
}

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: { proto: { type: "string" }, cert: { type: "string" }, token: { type: "string" } },
});
if (positionals.length !== 1) {
  console.error("usage: node wire_client.js ADDRESS [--proto PATH] [--cert FILE] [--token FILE]");
  process.exit(2);
}
const proto = options.proto || path.join(__dirname, "../coterie/wire/coterie.proto");
const loaded = loader.loadSync(proto, { keepCase: true, longs: Number, oneofs: true, defaults: true });
const { Coterie } = grpc.loadPackageDefinition(loaded).coterie.v1;
const credentials = options.cert
  ? grpc.credentials.createSsl(fs.readFileSync(options.cert))
  : grpc.credentials.createInsecure();
const token = options.token && fs.readFileSync(options.token, "utf8").trim();
const me = { protocol: 2, client: "wire_client.js", env_id: "CartPole-v1", number: -1 };
me.run_id = crypto.randomBytes(8).readBigUInt64LE().toString();
const envs = Array.from({ length: ENVS }, () => new CartPole());
let steps = 0;

// Opens a stream; calls `on[kind](content, stream)` for each frame. Any other end of the stream ends the program.
function connect(address, hello, on) {
  const stream = new Coterie(address, credentials).Infer();
  const nonce = token ? crypto.randomBytes(32) : Buffer.alloc(0);
  const watch = setTimeout(() => stream.cancel(), SILENCE_MS);
  stream.on("data", (frame) => {
    watch.refresh();
    if (frame.kind === "over") {
      console.log(`${steps} steps; over: ${frame.over.reason}`);
      process.exit(0);
    }
    if (frame.kind === "challenge") return prove(frame.challenge, nonce, stream);
    if (frame.kind) on[frame.kind](frame[frame.kind], stream); // a frame of no kind is a heartbeat
  });
  stream.on("error", (error) => {
    clearTimeout(watch);
    if (on.done) return;
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    process.exit(1);
  });
  stream.write({ hello: { ...me, ...hello, nonce } });
}

// The token is never sent: both ends prove that they know it, the server first.
function prove(server, nonce, stream) {
  const proof = (side) => crypto.createHmac("sha256", token).update(side).update(nonce).update(server.nonce).digest();
  if (server.proof.length !== 32 || !crypto.timingSafeEqual(server.proof, proof("server"))) {
    console.error("the server does not know the token");
    process.exit(1);
  }
  stream.write({ proof: proof("client") });
}

function show(number, stream) {
  const parts = SENDS.map(({ name, dtype }) => ARRAYS[dtype].from(envs.flatMap((env) => env.seen[name])));
  stream.write({ data: { number, tensors: Buffer.concat(parts.map((part) => Buffer.from(part.buffer))) } });
}

// Learner 0 assigns a learner.
connect(positionals[0], { envs: 0 }, {
  welcome({ number, learners }, stream) {
    this.done = true;
    stream.cancel();
    const [, host, port] = positionals[0].match(/^(.*):(.*)$/);
    const learner = number % learners;
    const socket = learner ? `${port}.${learner}` : port;
    connect(host === "unix" ? `unix:${socket}` : `${host}:${+port + learner}`, { envs: ENVS, sends: SENDS }, {
      welcome: (_, line) => show(0, line),
      data({ number, tensors }, line) {
        envs.forEach((env, i) => env.step(Number(tensors.readBigInt64LE(8 * i))));
        steps += envs.filter((env) => !env.seen.is_first).length;
        show(number + 1, line);
      },
    });
  },
});
