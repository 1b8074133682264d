"""The style sheet of a report."""

STYLE = """
:root{--page:#fbfbfa;--ink:#1c1d1f;--soft:#5d6168;--rule:#dcdee2;--grid:#e8e9ec;--card:#fff;
--s0:#1f68c4;--s1:#b8500c;--s2:#1b7d52;--s3:#8a3fb8;--s4:#a8283c;--s5:#0c7a8a;--s6:#77680a;
--s7:#56606e}
@media (prefers-color-scheme:dark){:root{--page:#16181b;--ink:#e9eaec;--soft:#a2a8b1;--rule:#363a41;
--grid:#2a2d33;--card:#1d2024;--s0:#6aa9ff;--s1:#ff9c57;--s2:#5ecf9a;--s3:#cf9bff;--s4:#ff8593;
--s5:#5fd0e0;--s6:#d9c64f;--s7:#b3bcc9}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1360px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;margin:0 0 4px}
h2{font-size:1.15rem;margin:32px 0 8px}
.about{color:var(--soft);margin:0 0 8px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;background:var(--card)}
th,td{padding:5px 10px;border:1px solid var(--rule);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600}
th.text,details th,details td{text-align:left}
td.text{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:min(22ch,40vw)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--rule);border-radius:6px}
figcaption{font-weight:600;margin-bottom:4px}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--grid);stroke-width:1}
.tick,.name{fill:var(--soft);font-size:11px}
.axis{fill:var(--soft);font-size:12px}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.dashed{stroke-dasharray:5 4}
.mark{fill:var(--c);stroke:var(--card);stroke-width:1}
.c0{--c:var(--s0)}.c1{--c:var(--s1)}.c2{--c:var(--s2)}.c3{--c:var(--s3)}
.c4{--c:var(--s4)}.c5{--c:var(--s5)}.c6{--c:var(--s6)}.c7{--c:var(--s7)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;color:var(--soft);font-size:13px;margin-top:4px}
.legend span{display:flex;align-items:center;gap:6px}
.key{width:24px;height:12px}
details{margin:12px 0;border-top:1px solid var(--rule);padding-top:8px}
summary{cursor:pointer;font-weight:600;margin-bottom:8px}
.note{border-left:3px solid var(--s1);margin:8px 0;padding:2px 10px}
details .wide{margin-top:12px}
"""
