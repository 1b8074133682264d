// What time it is somewhere. The browser knows the time zones, each by the name of a large city in it.

const OTHERS = { // cities without a time zone of their own name
  'Africa/Casablanca': 'Rabat',
  'America/Chicago': 'Austin,Dallas,Houston',
  'America/Guayaquil': 'Quito',
  'America/Los_Angeles': 'San Francisco,San Diego,Seattle,Portland,Las Vegas',
  'America/New_York': 'Boston,Washington,Miami,Atlanta,Philadelphia',
  'America/Sao_Paulo': 'Rio de Janeiro,Brasilia',
  'America/Toronto': 'Montreal,Ottawa',
  'Asia/Kolkata': 'Mumbai,Delhi,New Delhi,Bangalore,Chennai',
  'Asia/Ho_Chi_Minh': 'Hanoi,Saigon',
  'Asia/Shanghai': 'Beijing,Shenzhen,Guangzhou',
  'Asia/Tokyo': 'Osaka,Kyoto',
  'Australia/Sydney': 'Canberra',
  'Europe/Berlin': 'Munich,Hamburg,Cologne,Frankfurt',
  'Europe/Istanbul': 'Ankara',
  'Europe/Lisbon': 'Porto',
  'Europe/London': 'Edinburgh,Manchester',
  'Europe/Madrid': 'Barcelona,Seville',
  'Europe/Paris': 'Lyon,Marseille',
  'Europe/Rome': 'Milan,Naples,Florence',
  'Europe/Vienna': 'Graz,Salzburg',
  'Europe/Warsaw': 'Krakow',
  'Europe/Zurich': 'Bern,Basel,Geneva',
};

const plain = (name) => name.normalize('NFD').replace(/\p{M}/gu, '').replaceAll('_', ' ').trim().toLowerCase();

/** Time zones by the plain names of cities. */
function cities() {
  const found = new Map(Intl.supportedValuesOf('timeZone').map((zone) => [plain(zone.split('/').at(-1)), zone]));
  for (const [zone, names] of Object.entries(OTHERS)) {
    for (const name of names.split(',')) found.set(plain(name), zone);
  }
  return found;
}

/** The time zone of a city, or one that is named itself. Throws an Error where there is none. */
export function zoneOf(place) {
  const known = cities().get(plain(place.split(',')[0]));
  if (known) return known;
  try {
    if (/^[a-z]/i.test(place)) return new Intl.DateTimeFormat('en', { timeZone: place }).resolvedOptions().timeZone;
  } catch { /* it is none */ }
  throw new Error(`No time zone is known for '${place}'. Name a large city, or a time zone such as Europe/Berlin.`);
}

/** {time: 'HHMM', date: 'Wednesday, 25 November 2026'} at that moment. */
export function timeIn(place, moment) {
  const timeZone = zoneOf(place);
  const shown = (options) => new Intl.DateTimeFormat('en-GB', { timeZone, ...options }).formatToParts(moment);
  const part = (parts, type) => parts.find((one) => one.type === type).value;
  const clock = shown({ hour: '2-digit', minute: '2-digit', hourCycle: 'h23' });
  const day = shown({ weekday: 'long', day: 'numeric', month: 'long', year: 'numeric' });
  const [weekday, number, month, year] = ['weekday', 'day', 'month', 'year'].map((type) => part(day, type));
  return { time: part(clock, 'hour') + part(clock, 'minute'), date: `${weekday}, ${number} ${month} ${year}` };
}
