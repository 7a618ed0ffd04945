// The policy plays game after game. In the address: ?seed=N for the same games again, ?fast without waiting.
import * as ort from "./ort.wasm.bundle.min.mjs";
import * as env from "./cartpole.mjs";

ort.env.wasm.numThreads = 1; // several need headers that a plain server does not send

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };

/** What `policy.json` describes; keeps what the network remembers from step to step. */
export class Agent {
  static async load(base) {
    const about = await (await fetch(new URL("policy.json", base))).json();
    return new Agent(about, await ort.InferenceSession.create(new URL("policy.onnx", base).href));
  }

  constructor(about, session) {
    this.about = about;
    this.session = session;
    this.kept = Object.fromEntries(
      about.inputs.map(({ name, shape, dtype }) => {
        const dims = [1, ...shape.slice(1)];
        return [name, new ort.Tensor(dtype, new ARRAYS[dtype](dims.reduce((a, b) => a * b)), dims)];
      }),
    );
  }

  /** The greedy action. `first`: a game begins; `reward`: of the last action. */
  async act(observation, first, reward) {
    const given = { obs: observation, is_first: [first ? 1 : 0], prev_reward: [reward] };
    for (const [name, values] of Object.entries(given)) this.kept[name]?.data.set(values);
    const out = await this.session.run(this.kept);
    for (const name of Object.keys(this.kept)) this.kept[name] = out[`next_${name}`] ?? this.kept[name];
    return Number(out.action.data[0]);
  }
}

/** Numbers from 0 to 1, the same for a seed: a linear congruential generator with Numerical Recipes' constants. */
function generator(seed) {
  let state = seed >>> 0;
  return () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32;
}

async function main() {
  const [status, returns, fast] = ["status", "returns", "fast"].map((id) => document.getElementById(id));
  const context = document.getElementById("scene").getContext("2d");
  const options = new URLSearchParams(location.search);
  const random = options.has("seed") ? generator(Number(options.get("seed"))) : Math.random;
  fast.checked = options.has("fast");
  const agent = await Agent.load(import.meta.url);
  const { preset, env_steps: trained, env: { id, action_repeat: repeat, max_episode_steps: limit } } = agent.about;
  document.title = document.getElementById("title").textContent = `${preset} plays ${id}`;
  for (;;) {
    let state = env.reset(random), reward = 0, total = 0, over = false;
    for (let steps = 0; !over; ) {
      const action = await agent.act(state, steps === 0, reward);
      reward = 0;
      for (let k = 0; k < repeat && !over; k++) {
        const next = env.step(state, action);
        state = next.state;
        reward += next.reward;
        over = next.terminated || ++steps === limit;
      }
      total += reward;
      if (!fast.checked || over) {
        env.draw(context, state);
        status.textContent = `Trained for ${trained} env steps. This game: ${total}`;
        await new Promise((done) => setTimeout(done, fast.checked ? 0 : 1000 / env.framesPerSecond));
      }
    }
    returns.textContent += `${returns.textContent && ", "}${total}`;
  }
}

main().catch((error) => {
  const status = document.getElementById("status");
  status.className = "error";
  status.textContent = `It does not play: ${error.message}`;
});
