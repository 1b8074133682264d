// LangChain.js's ChatOpenAI, over chat completions and over the Responses API.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ContextOverflowError } from "@langchain/core/errors";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { ANNA, CITY, MAX_TOKENS, OSLO, Person, SUM, TOO_LONG, WEATHER, Weather, demo, key, model, url } from "./asked.mjs";

const settings = {
  model,
  temperature: 0,
  maxTokens: MAX_TOKENS,
  maxRetries: 3,
  apiKey: key,
  configuration: { baseURL: `${url}/v1` },
};
const chat = new ChatOpenAI(settings);
// A tool as JSON schema: the one of a zod object is longer, and the built-in model reads it worse.
const weatherTool = (weather) =>
  tool(({ city }) => weather.ask(city), { name: "get_weather", description: WEATHER, schema: CITY });

async function streamed(runnable, asked) {
  let message;
  for await (const chunk of await runnable.stream(asked)) message = message?.concat(chunk) ?? chunk;
  return message;
}

test("a chat is answered alike whole and streamed", async () => {
  const whole = await chat.invoke(SUM);
  assert.equal((await streamed(chat, SUM)).content, whole.content);
  assert.ok(whole.content);
  if (demo) assert.equal(whole.content, "42");
});

test("responses show the reasoning", async () => {
  const responses = new ChatOpenAI({ ...settings, useResponsesApi: true });
  const whole = await responses.invoke(SUM);
  assert.equal((await streamed(responses, SUM)).text, whole.text);
  assert.ok(whole.text);
  const kinds = whole.contentBlocks.map(({ type }) => type);
  assert.deepEqual(kinds, demo ? ["reasoning", "text"] : ["text"]);
});

test("calls are forced by any and by name", async () => {
  for (const tool_choice of ["any", "get_weather"]) {
    const offered = chat.bindTools([weatherTool(new Weather())], { tool_choice });
    const whole = await offered.invoke(OSLO);
    const pieces = await streamed(offered, OSLO);
    const calls = ({ tool_calls }) => tool_calls.map(({ name, args }) => [name, args]);
    assert.deepEqual(calls(pieces), calls(whole));
    assert.deepEqual(calls(whole)[0], ["get_weather", { city: "Oslo" }]);
  }
});

test("a loop of three calls keeps its history", async () => {
  const weather = new Weather();
  // A model that calls only where it must is made to.
  const choice = { tool_choice: demo ? "auto" : "required", parallel_tool_calls: false };
  const offered = chat.bindTools([weatherTool(weather)], choice);
  const messages = [new HumanMessage(OSLO)];
  for (let made = 0; made < 3; made++) {
    const answer = await streamed(offered, messages);
    assert.equal(answer.tool_calls.length, 1);
    const [{ id, args }] = answer.tool_calls;
    messages.push(answer, new ToolMessage({ tool_call_id: id, content: weather.ask(args.city) }));
  }
  assert.ok((await chat.invoke(messages)).content);
  if (demo) assert.ok(weather.calledThreeTimes(), weather.cities.join());
});

test("an answer is typed by a schema and by a call", async () => {
  for (const method of ["jsonSchema", "functionCalling"]) {
    const typed = chat.withStructuredOutput(Person, { name: "person", method });
    const answer = await typed.invoke(ANNA);
    let last;
    for await (const part of await typed.stream(ANNA)) last = part;
    assert.deepEqual(last, answer);
    assert.equal(typeof answer.age, "number");
    if (demo) assert.equal(answer.age, 36);
  }
});

test("errors have the server's status and words", async () => {
  const missing = new ChatOpenAI({ ...settings, model: "none-such" });
  await assert.rejects(missing.invoke(SUM), { status: 404 });
  const wide = new ChatOpenAI({ ...settings, temperature: 1e9 });
  await assert.rejects(wide.invoke(SUM), { status: 400 });
  const stranger = new ChatOpenAI({ ...settings, apiKey: "wrong" });
  await assert.rejects(stranger.invoke(SUM), { status: 401 });
  await assert.rejects(chat.invoke(TOO_LONG), (error) => ContextOverflowError.isInstance(error));
  await assert.rejects(streamed(chat, TOO_LONG), (error) => ContextOverflowError.isInstance(error));
});
