// gRPC's own client for Node, with messages loaded from the .proto file: PENSTOCK_GRPC is its address.
import assert from "node:assert/strict";
import { after, test } from "node:test";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { MAX_TOKENS, SUM, demo, key, model } from "./asked.mjs";

const root = fileURLToPath(new URL("../../..", import.meta.url));
const definition = loader.loadSync("protocol/grpc/penstock.proto", {
  includeDirs: [root],
  keepCase: true,
  defaults: true,
  enums: String,
  longs: Number,
  oneofs: true,
});
const { Penstock } = grpc.loadPackageDefinition(definition).penstock.v1;
const client = new Penstock(process.env.PENSTOCK_GRPC, grpc.credentials.createInsecure());
after(() => client.close());
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${key}`);
const question = { model, messages: [{ role: "user", content: SUM }], sampling: { temperature: 0, max_tokens: MAX_TOKENS } };

async function gathered(stream) {
  const found = { text: "", reasoning: "", messages: 0, finish: "", usage: null };
  for await (const message of stream) {
    found.messages += 1;
    found.usage = message.usage ?? found.usage;
    for (const delta of message.deltas) {
      found.text += delta.text;
      found.reasoning += delta.reasoning;
      found.finish += delta.finish?.reason ?? "";
    }
  }
  return found;
}

const once = (method, request) =>
  new Promise((resolve, reject) =>
    client[method](request, metadata, (error, answer) => (error ? reject(error) : resolve(answer))),
  );

test("a chat is answered alike whole and streamed", async () => {
  const pieces = await gathered(client.Chat(question, metadata));
  const whole = await gathered(client.Chat({ ...question, options: { stream: false } }, metadata));
  assert.ok(pieces.messages > 1);
  assert.equal(whole.messages, 1);
  assert.equal(whole.text, pieces.text);
  assert.equal(whole.usage.completion_tokens, pieces.usage.completion_tokens);
  if (demo) {
    assert.equal(pieces.text, "42");
    assert.match(pieces.reasoning, /17/);
    assert.equal(pieces.finish, "STOP");
  }
});

test("a text is generated and tokenized, and models are listed", async () => {
  const { models } = await once("Models", {});
  assert.ok(models.some((one) => one.names.includes(model) && one.ready));
  const { token_ids } = await once("Tokenize", { model, text: "Hello there" });
  const asked = { model, token_ids: { ids: token_ids }, sampling: { temperature: 0, max_tokens: 5 } };
  const found = await gathered(client.Generate(asked, metadata));
  assert.equal(found.usage.prompt_tokens, token_ids.length);
});

test("a stream can be cancelled, and has a deadline", async () => {
  const long = { model, text: "Once", sampling: { max_tokens: 1500, ignore_eos: true } };
  const stream = client.Generate(long, metadata);
  const cancelled = new Promise((resolve) => stream.once("error", resolve));
  stream.once("data", () => stream.cancel());
  assert.equal((await cancelled).code, grpc.status.CANCELLED);
  const late = gathered(client.Generate(long, metadata, { deadline: Date.now() + 300 }));
  await assert.rejects(late, (error) => error.code === grpc.status.DEADLINE_EXCEEDED);
});

test("errors have codes, and say what is wrong", async () => {
  const hot = gathered(client.Chat({ ...question, sampling: { temperature: 300 } }, metadata));
  await assert.rejects(hot, (error) => {
    assert.equal(error.code, grpc.status.INVALID_ARGUMENT);
    assert.match(error.details, /temperature is 300/);
    return true;
  });
  const other = gathered(client.Chat({ ...question, model: "none-of-ours" }, metadata));
  await assert.rejects(other, (error) => error.code === grpc.status.NOT_FOUND);
  const keyless = gathered(client.Chat(question));
  await assert.rejects(keyless, (error) => error.code === grpc.status.UNAUTHENTICATED);
});
