// The OpenAI SDK for Node: chat completions and responses.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ANNA, CITY, MAX_TOKENS, OSLO, Person, SUM, TOO_LONG, WEATHER, Weather, demo, key, model, url } from "./asked.mjs";

const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 3 });
const asked = { model, temperature: 0, max_tokens: MAX_TOKENS };
const user = (text) => [{ role: "user", content: text }];
const weatherTool = (weather) => ({
  type: "function",
  function: {
    name: "get_weather",
    description: WEATHER,
    parameters: CITY,
    parse: JSON.parse,
    function: ({ city }) => weather.ask(city),
  },
});
const declared = weatherTool(new Weather());
delete declared.function.parse;
delete declared.function.function;

test("a chat is answered alike whole and streamed", async () => {
  const whole = await api.chat.completions.create({ ...asked, messages: user(SUM) });
  const stream = api.chat.completions.stream({ ...asked, messages: user(SUM) });
  const pieces = await stream.finalChatCompletion();
  const { content, reasoning } = whole.choices[0].message;
  assert.equal(pieces.choices[0].message.content, content);
  assert.ok(content);
  if (demo) {
    assert.equal(content, "42");
    assert.match(reasoning, /17/);
  }
});

test("calls are forced by required and by name", async () => {
  const named = { type: "function", function: { name: "get_weather" } };
  for (const tool_choice of ["required", named]) {
    const settings = { ...asked, messages: user(OSLO), tools: [declared], tool_choice };
    const whole = (await api.chat.completions.create(settings)).choices[0];
    const pieces = (await api.chat.completions.stream(settings).finalChatCompletion()).choices[0];
    assert.equal(whole.finish_reason, "tool_calls");
    const calls = ({ message }) => message.tool_calls.map((call) => call.function.arguments);
    assert.deepEqual(calls(pieces), calls(whole));
    assert.deepEqual(JSON.parse(calls(whole)[0]), { city: "Oslo" });
  }
});

test("the SDK's loop makes three calls and answers", { skip: !demo }, async () => {
  for (const stream of [false, true]) {
    const weather = new Weather();
    const runner = api.chat.completions.runTools({
      ...asked, stream, messages: user(OSLO), tools: [weatherTool(weather)],
    });
    assert.ok(await runner.finalContent());
    assert.ok(weather.calledThreeTimes(), weather.cities.join());
  }
});

test("an answer is parsed as a type", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const settings = { ...asked, messages: user(ANNA), response_format };
  const whole = (await api.chat.completions.parse(settings)).choices[0].message.parsed;
  const pieces = await api.chat.completions.stream(settings).finalChatCompletion();
  assert.deepEqual(pieces.choices[0].message.parsed, whole);
  assert.equal(typeof whole.age, "number");
  if (demo) assert.equal(whole.age, 36);
});

test("a response is whole, streamed, typed and continued", async () => {
  const settings = { model, temperature: 0, max_output_tokens: MAX_TOKENS };
  const whole = await api.responses.create({ ...settings, input: SUM });
  const stream = api.responses.stream({ ...settings, input: SUM });
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
  const text = { format: zodTextFormat(Person, "person") };
  const typed = await api.responses.parse({ ...settings, input: ANNA, text });
  assert.equal(typeof typed.output_parsed.age, "number");
  const next = { previous_response_id: whole.id, input: "What is 3 + 4?" };
  assert.ok((await api.responses.create({ ...settings, ...next })).output_text);
});

test("errors are those of the SDK", async () => {
  const create = (given) => api.chat.completions.create({ ...asked, messages: user(SUM), ...given });
  await assert.rejects(create({ model: "none-such" }), OpenAI.NotFoundError);
  await assert.rejects(create({ temperature: 1e9 }), OpenAI.BadRequestError);
  for (const stream of [false, true]) {
    await assert.rejects(create({ messages: user(TOO_LONG), stream }), { code: "context_length_exceeded" });
  }
  const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 3 });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
});
