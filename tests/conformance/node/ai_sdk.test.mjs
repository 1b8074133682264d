// Vercel's AI SDK with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { ANNA, City, MAX_TOKENS, Minutes, OSLO, Person, SUM, TIMER, TOO_LONG, WEATHER, Weather, demo, key, model, url } from "./asked.mjs";

const provider = createOpenAICompatible({
  name: "penstock",
  baseURL: `${url}/v1`,
  apiKey: key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(model), temperature: 0, maxOutputTokens: MAX_TOKENS, maxRetries: 3 };
const weatherTool = (weather) =>
  tool({ description: WEATHER, inputSchema: City, execute: async ({ city }) => weather.ask(city) });

test("a chat is answered alike whole and streamed", async () => {
  const whole = await generateText({ ...asked, prompt: SUM });
  const stream = streamText({ ...asked, prompt: SUM });
  assert.equal(await stream.text, whole.text);
  assert.ok(whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  if (demo) {
    assert.equal(whole.text, "42");
    assert.match(whole.reasoningText, /17/);
    assert.equal(await stream.reasoningText, whole.reasoningText);
  }
});

test("calls are forced by required and by name", async () => {
  const tools = {
    get_weather: tool({ description: WEATHER, inputSchema: City }),
    set_timer: tool({ description: TIMER, inputSchema: Minutes }),
  };
  for (const toolChoice of ["required", { type: "tool", toolName: "set_timer" }]) {
    const settings = { ...asked, prompt: OSLO, tools, toolChoice };
    const made = (calls) => calls.map(({ toolName, input }) => [toolName, input]);
    const whole = made((await generateText(settings)).toolCalls);
    assert.deepEqual(made(await streamText(settings).toolCalls), whole);
    assert.ok(whole.length);
    if (toolChoice !== "required") assert.equal(whole[0][0], "set_timer");
  }
});

test("the SDK's loop makes three calls and answers", { skip: !demo }, async () => {
  for (const run of [generateText, streamText]) {
    const weather = new Weather();
    const tools = { get_weather: weatherTool(weather) };
    const result = await run({ ...asked, prompt: OSLO, tools, stopWhen: stepCountIs(5) });
    assert.ok(await result.text);
    assert.equal((await result.steps).length, 4);
    assert.ok(weather.calledThreeTimes(), weather.cities.join());
  }
});

test("a loop of forced calls ends where it is told to", async () => {
  const weather = new Weather();
  const tools = { get_weather: weatherTool(weather) };
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber < 3 ? "required" : "none" });
  const result = await generateText({ ...asked, prompt: OSLO, tools, prepareStep, stopWhen: stepCountIs(4) });
  assert.equal(result.steps.filter((step) => step.toolCalls.length).length, 3);
  assert.ok(result.text);
});

test("an answer is an object of a schema", async () => {
  const settings = { ...asked, prompt: ANNA, output: Output.object({ schema: Person }) };
  const whole = await generateText(settings);
  const stream = streamText(settings);
  let last;
  for await (const partial of stream.partialOutputStream) last = partial;
  assert.deepEqual(last, whole.output);
  assert.equal(typeof whole.output.age, "number");
});

test("errors are the SDK's, with the status", async () => {
  const failed = (statusCode, words) => (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, statusCode);
    assert.match(error.message, words);
    return true;
  };
  const missing = { ...asked, model: provider("none-such") };
  await assert.rejects(generateText({ ...missing, prompt: SUM }), failed(404, /none-such/));
  const wide = { ...asked, temperature: 1e9 };
  await assert.rejects(generateText({ ...wide, prompt: SUM }), failed(400, /temperature/));
  const strange = createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey: "wrong" });
  const stranger = { ...asked, model: strange(model) };
  await assert.rejects(generateText({ ...stranger, prompt: SUM }), failed(401, /key/));
  const errors = [];
  const onError = ({ error }) => void errors.push(error);
  await streamText({ ...asked, prompt: TOO_LONG, onError }).consumeStream();
  assert.ok(failed(400, /prompt is too long/)(errors[0]));
});
