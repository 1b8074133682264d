// The Anthropic SDK for Node.
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { ANNA, CITY, City, MAX_TOKENS, OSLO, Person, SUM, TOO_LONG, WEATHER, Weather, demo, key, model, url } from "./asked.mjs";

const api = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 3 });
// Greedy: the SDK's types leave temperature out for some models, its requests do not.
const asked = { model, max_tokens: MAX_TOKENS, temperature: 0 };
const user = (text) => [{ role: "user", content: text }];
const tools = [{ name: "get_weather", description: WEATHER, input_schema: CITY }];

test("a chat is answered alike whole and streamed", async () => {
  const whole = await api.messages.create({ ...asked, messages: user(SUM) });
  const pieces = await api.messages.stream({ ...asked, messages: user(SUM) }).finalMessage();
  assert.ok(whole.content[0].text);
  assert.equal(pieces.content[0].text, whole.content[0].text);
  if (!demo) return;
  const thinking = { type: "adaptive" };
  const thought = await api.messages.stream({ ...asked, messages: user(SUM), thinking }).finalMessage();
  assert.deepEqual(thought.content.map((block) => block.type), ["thinking", "text"]);
  assert.equal(thought.content[1].text, "42");
});

test("calls are forced by any and by name", async () => {
  for (const tool_choice of [{ type: "any" }, { type: "tool", name: "get_weather" }]) {
    const settings = { ...asked, messages: user(OSLO), tools, tool_choice };
    const whole = await api.messages.create(settings);
    const pieces = await api.messages.stream(settings).finalMessage();
    assert.equal(whole.stop_reason, "tool_use");
    const inputs = ({ content }) => content.map((block) => block.input);
    assert.deepEqual(inputs(pieces), inputs(whole));
    assert.deepEqual(inputs(whole)[0], { city: "Oslo" });
  }
});

test("the SDK's loop makes three calls and answers", { skip: !demo }, async () => {
  for (const stream of [false, true]) {
    const weather = new Weather();
    const run = ({ city }) => weather.ask(city);
    const tool = betaZodTool({ name: "get_weather", description: WEATHER, inputSchema: City, run });
    const runner = api.beta.messages.toolRunner({ ...asked, stream, messages: user(OSLO), tools: [tool] });
    const last = await runner.runUntilDone();
    assert.equal(last.content[0].type, "text");
    assert.ok(weather.calledThreeTimes(), weather.cities.join());
  }
});

test("an answer is parsed as a type", async () => {
  const output_config = { format: zodOutputFormat(Person) };
  const answer = await api.messages.parse({ ...asked, messages: user(ANNA), output_config });
  assert.equal(typeof answer.parsed_output.age, "number");
});

test("errors are those of the SDK", async () => {
  const create = (given) => api.messages.create({ ...asked, messages: user(SUM), ...given });
  await assert.rejects(create({ model: "none-such" }), Anthropic.NotFoundError);
  await assert.rejects(create({ temperature: 1e9 }), Anthropic.BadRequestError);
  for (const stream of [false, true]) {
    await assert.rejects(create({ messages: user(TOO_LONG), stream }), (error) => {
      assert.ok(error instanceof Anthropic.BadRequestError);
      assert.match(error.message, /prompt is too long/);
      return true;
    });
  }
  const stranger = new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 3 });
  await assert.rejects(stranger.models.list(), Anthropic.AuthenticationError);
});
