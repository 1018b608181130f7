// Two sequences of a worker in JavaScript: the second gets the first block of the first from the cache (README.md).
//
// node session.js HOST:PORT GOOGLEAPIS, the latter a folder that holds google/rpc/status.proto.
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [manager, googleapis] = process.argv.slice(2);
const protos = path.join(__dirname, "../../protos");
// A number of 64 bits does not fit into a JavaScript number: `longs: String` hands it over as a decimal string, and takes it as one.
const options = { includeDirs: [protos, googleapis], longs: String, enums: String, keepCase: true, defaults: true };
const { CacheService } = grpc.loadPackageDefinition(protoLoader.loadSync("kvpool/v1/cache.proto", options)).kvpool.v1;
const client = new CacheService(manager, grpc.credentials.createInsecure(), {
  "grpc.enable_retries": 0,
  "grpc.enable_http_proxy": 0,
  "grpc.max_receive_message_length": 16 << 20,
});

/** One unary call with a deadline. A failed call or item throws. */
function call(method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + 2000 }, (error, reply) => {
      const failed = (reply?.results ?? []).find((result) => result.status.code !== 0);
      if (error || failed) reject(error ?? new Error(failed.status.message));
      else resolve(reply);
    });
  });
}

/** Token ids as little-endian uint32. */
function pack(tokens) {
  const bytes = Buffer.alloc(4 * tokens.length);
  tokens.forEach((token, index) => bytes.writeUInt32LE(token, 4 * index));
  return bytes;
}

async function main() {
  const fingerprint = "toy-js";
  const registered = await call("Register", {
    worker_id: "js",
    incarnation: String(BigInt(Date.now()) * 1000000n),
    register_no: 1,
    address: "127.0.0.1:9",
    model_fingerprint: fingerprint,
    kv_cache_config: { block_size: 4, groups: [{ full_attention: {} }], pools: [{ tier: "TIER_DEVICE", num_blocks: 9 }] },
  });
  const session = { session: registered.session, session_key: registered.session_key };
  let callNo = 0;
  const uplink = () => ({ ...session, call_no: ++callNo }); // a larger number in each mutating call, one call at a time
  const keepAlive = setInterval(() => call("KeepAlive", session).catch(console.error), registered.keep_alive_interval_ms);
  try {
    const prompts = { a: [1, 2, 3, 4, 5, 6], b: [1, 2, 3, 4, 9] };
    for (const [name, tokens] of Object.entries(prompts)) {
      const key = { sequence_id: name, attempt: 1 };
      const item = { key, root: { model_fingerprint: fingerprint }, tokens: pack(tokens), max_new_tokens: 1 };
      const { granted } = (await call("Allocate", { uplink: uplink(), items: [item] })).results[0];
      console.log(`${name}: blocks ${granted.tables[0].block_ids.join(" ")}, ${granted.num_cached_tokens} tokens cached`);
      // Here an engine computes the KV of the tokens that are not cached. Free reports it as complete, and ends the sequence.
      await call("Free", { uplink: uplink(), items: [{ update: { key, num_computed_tokens: tokens.length } }] });
    }
  } finally {
    clearInterval(keepAlive);
    await call("Deregister", session);
    client.close();
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
