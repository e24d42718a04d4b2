"""Findings that no mutant reintroduces, each with the reason.

A finding is a row of docs/internals/findings.md. A mutant names the findings that it reintroduces. A test
checks that every finding is named here or by a mutant. `SECTIONS` has whole sections of findings.
"""

from __future__ import annotations

OUT_OF_REACH: dict[str, str] = {
    "the fault was in the simulator itself": "R975",
    "a power loss within two operations of a snapshot: its guards try each of these steps": "R1110",
    "no simulated application iterates for an hour without a record": "R1111",
    "simulated syncs take no real time, and no simulated broker has a temporary directory": "R1112",
    "no simulated topic changes what is too large for it": "R652 R800 R852",
    "the simulator measures expiry by the broker's clock, which does not go back": (
        "R850 R1030 R1031 R1120 R1122"
    ),
    "the simulator takes DeliveryUnknown for any outcome": "R802",
    "no simulated client is closed by one task while another connects": "R803",
    "no simulated administrator alters settings of several brokers": "R801 R1418",
    "no simulated broker has a default retention of 0 ms": "R1302",
    "no directory of a running Apache Kafka, of an older version or of a backup is simulated": (
        "C16b C3b R2 R24 R26 R27 R28 R29 R36 R37 R38 R39 R40 R363 R365 R451 R631 R632 R832 R956 R1004 R1280 "
        "R1321 R1333 R1334 R1350 R1351 R1352 R1357 R1490 R1495 R1496 R1726"
    ),
    "virtual time stands still while code runs": (
        "C8 C20 R670 S1 S2 S3 S4 S5 S15 S17 R3 R13 R14 R15 R19 R22 R34 R42 R43 R110 R111 R160 R162 R163 "
        "R211 R710 R250 R251 R252 R281 R283 R324 R325 R354 R371 R373 R374 R375 R376 R379 R421 R440 R476 "
        "R477 R511 R635 R620 G7 R49 L12 R630 R642 R646 R700 R702 R772 R1001 R1005 R1035 R1129 R1300 R1340 "
        "R1341 R1354 R1355 R1356 R1361 R1367 R1372 R1410 R1411 R1412 R1413 R1414 R1415 R1416 R1417 R1419 "
        "R1450 R1451 R1452 R1531 R1532 R1533 R1534 R1535 R1537 R1547 R1553 R1554 R1565 R1567 R1600 R1601 "
        "R1640 R1656 R1670 R1672 R1673 R1677 R1691 R1695 R1696 R1714 R1715 R1716 R1721 R1722 R1723 R1725 "
        "R1763 R1734 R1735 R1736 R1792 R1793"
    ),
    "memory, threads and descriptors are not counted": (
        "R332 S8 S14 S19 R35 R45 R112 G9 R181 R210 R246 R320 R321 R361 R372 R915 R930 L24a L24b R1000 R1003 "
        "R1353 R1371 R1500 R1501 R1546 R1552 R1602 R1641 R1642 R1643 R1657 R1671 R1675 R1676 R1678 R1692 "
        "R1693 R1712 R1713 R1762 R1765 R1740 R1742 R1730 R1731 R1768 R1737 R1743 R1783 R1790 "
        "R1791 R1794"
    ),
    "TLS, SASL, ACLs, quotas and the metrics port are not simulated": (
        "S6 S7 S10 S11 S13 S20 R5 R44 R182 R254 R508 R640 R641 R643 R645 R791 R793 R851 R1006 R1260"
        " R1261 R1262 R1263 R1264 R1301 R1304 R1344 R1345 R1440 R1515 R1566 R1655 R1761 R1767"
    ),
    "only our clients' requests and random ones are sent": (
        "K1 K3 K4 K5 R4 R6 R7 R8 R9 R30 R31 R70 R633 R920 R965 R1007 R1690 R1694 R1760 R1764 R1795"
    ),
    "Spark itself is not simulated": (
        "G4 G5 G6 G9b G10 G11 G12 G13 P5 R78 R79 R90 R191 R192 R194 R405 R407 R408 R662 R811 R812 R1222 R1223"
        " R1224 R1225 R1627"
    ),
    "the audit of files and topics is not simulated": (
        "P3 P4 R86 R87 R88 R89 R193 R290 R291 R295 R406 R409 R460 R660 R661 R720 R721 R722 R724 R860"
        " R1067 R1070 R1464"
    ),
    "commands, web pages, packages and documents are not simulated": (
        "S12 S16 S18 K6 K7 R91 R96 R97 R98 R99 R100 R101 R292 R102 R103 R104 R113 R540 R541 R644"
        " R723 R870 R990 R991 R992 R1060 R1061 R1062 R1063 R1064 R1065 R1066 R1068 R1069 R1071 R1072 R1073"
        " R1140 R1141 R1142 R1143 R1144 R1145 R1146 R1147 R1148 R1149 R1150 R1151 R1152 R1153"
        " R1094 R1180 R1181 R1182 R1183 R1184 R1185 R1200 R1201 R1202 R1203 R1204 R1205 R1206 R1207 R1208"
        " R1209 R1230 R1231 R1232 R1233 R1213 R1303 R1394 R1395 R1397 R1399 R1427 R1428 R1461 R1463"
        " R1470 R1471 R1472 R1473 R1474 R1502 R1521 R1522 R1524"
        " R1580 R1581 R1583 R1584 R1625 R1626 R1629 R1703 R1704 R1705 R1750"
        " R1514 R1516 R1517 R1518"
    ),
    "the network seldom loses the heartbeat that a member needs before it takes new partitions": "R730",
    "a start is refused wherever the list of topics is lost": "R25 R109",
    "no simulated application unsubscribes, or commits in `on_partitions_lost`": "R58 L10b R441 R496 R1127",
    "no fault makes a fetch end with an error that is not expected": "L22a",
    "simulated consumers commit in the task that polls, and seldom while a coordinator loads": (
        "R605 R606 R1711 R1732"
    ),
    "one connection carries all requests of a member to its coordinator": "R607",
    "simulated applications poll soon after a commit was refused": "R680",
    "no simulated consumer is closed before it has read": "R681",
    "no simulated consumer is assigned partitions by hand and then subscribes": "R682",
    "the tests of mutants and of seeds check it": "R931 R932",
    "nothing checks what clients log": "R684 R900",
    "commits during a simulated rebalance are seldom the last ones of their partition": "R688 R781",
    "no simulated host has several addresses": "R608",
    "no topic is missing, and none has fewer partitions when it is made again": (
        "L9 L15 L19 L20 L21 L22 L24c L25c R71 R183 R184 R185 R392 R393 R442 R443 R444 R1364 R1766"
    ),
    "the disk keeps the names of a directory whose sync failed": "R352",
    "the simulated disk has no symbolic links": "R362",
    "no existence check of a file fails on the simulated disk": "R760",
    "nothing checks the errors of simulated starts": "R762",
    "nothing checks that deletions free a full disk": "R353 R1443",
    "no power loss follows a start that fences": "R475",
    "no second power loss follows a clean stop of a log that was cut to offset 0": "R1002",
    "no power loss soon follows a start that creates a topic's directories": "R622",
    "no coordinator's log is compacted shortly before a power loss": "R621 R1032",
    "clients wait for the answer of AddPartitionsToTxn": "R478",
    "no topic is created while renames and syncs of directories fail": "R480 R566 R600 R601 R602",
    "no fault fails the creation of a segment's index files alone": "R585 R604",
    "no disk writes part of the data and then fails to truncate it": "R610",
    "tombstones of simulated topics are removed after seconds": "R611",
    "no power loss comes between a partition's first roll and its next flush": "R603 R671",
    "no transactions run on a compacted topic across two power losses": "R612 R614",
    "large requests are seldom under way while a job of the log has a slow disk": "R750",
    "no topic is created again within one sync of a checkpoint, and then compacted": "R751",
    "no segment is deleted while a simulated look-up decompresses its batch": "R833",
    "nothing checks that compaction continues after the traffic ends": "R743",
    "no single call fails during a swap, or at the end of a partition": "R613 R830 R831 R1741",
    "nothing measures the memory that a compaction takes": "R792",
    "simulated responses are smaller than the buffers that are used again": "R1090",
    "simulated batches have few records": "R1091",
    "no simulated file becomes shorter while it is read": "R1093",
    "no caller leaves a callback for a record that does not exist": "R1092",
    "no stop comes during a request in steps": "R712",
    "no disk loses what was synced": "R364 R450 R1250 R1251 R1252 R1281 R1282 R1283 R1284 R1310 R1311 "
    "R1312 R1313 R1314 R1320 R1322 R1323 R1324 R1330 R1331 R1332 R1442 R1444 R1445 R1446",
    "no client closes right after requests whose answers it does not read": "R509 R565 R790 R840",
    "the simulated network has no host names, and its broker is not Apache Kafka": "R507 R510 R711 R810 R929",
    "no simulated consumer subscribes by pattern": "R1 R17 R20 R479 R683",
    "no simulated disk refuses the last snapshot before compaction and a power loss": "R1441",
    "the seeds of a log alone were not searched for it": "R1511",
    "no check reads the warnings of a start about snapshots": "R1512",
    "no reader of transactions follows a power loss within the deletion of a segment": "R1611",
    "no simulated DeleteRecords meets a full disk and a swap": "R1724",
    "no simulated flush runs between two renames of a deletion": "R1782",
    "no check of a compacted log looks up times after a power loss": "R1776",
    "no single read fails on a simulated disk": "R1780",
    "simulated records have no timestamp of 0": "R1781",
    "no simulated file fails to close": "R1820",
    "no simulated client looks up the largest timestamp": "R1513 R1551 R1610",
    "the internal topics of simulated brokers are compacted and not deleted": "R1550",
    "no simulated disk lacks inodes": "R1542",
    "no power loss soon follows DeleteRecords up to the log end": "R690 R1335",
    "a power loss seldom takes an epoch and leaves its batches": "R691 R761 R822",
    "producers may fail and be replaced": "R66 R67 R68 R69",
    "days pass for idle groups, and for topics that are not compacted": "R16 R18",
    "simulated clients of mixed versions meet few power losses": "R771 R773 R821",
    "no topic is deleted while files are loaded": "R506",
    "no load continues with other options": "R663",
    "no start with a lost completion met an open next transaction": "R521",
    "the workloads do not draw the needed events": (
        "G8 L17 L18 R293 R294 R296 R410 R430 R431 R11 R12 R21 R23 R161 S9 R390 R391 R394 R465"
        " R495 R497 R499 R500 R505 R550 R575 R576 R623 R634 R624 R686 R701 R755 R820 R823 R1034"
        " R1123 R1124 R1125 R1128 R1272"
    ),
    "no caller passes such numbers": "R1497",
    "nothing but its reader runs after a flipped bit": "R244 R245 R301 R1126 R1241",
    "each simulated cluster is one broker, at one address that resolves": (
        "R490 R491 R492 R493 R498 R577 R578 R579 R742 R1363"
    ),
    "no broker answers with a wrong correlation id or refuses a second login": "R446",
    "nothing checks that members keep partitions, or that groups act soon": (
        "K2 K8 R280 R282 R780 L8 L16 R1365"
    ),
    "threads are suspended only before disk operations": "R33 R461 R494 R580",
    "simulated topics of the sink keep their partitions": "R1154",
    "simulated topics of the sink exist before its rows": "R1271",
    "the simulation of processing loops does not end, so it cannot name a violated rule": "R1161",
    "simulated loops read topics that are neither deleted nor shortened": "R1170 R1171",
    "simulated loops write to one topic with a valid name": "R1174",
    "simulated loops are cancelled once": "R1175",
    "simulated clients are cancelled within a block, not while it begins or ends": "R1530",
    "simulated producers are initialized with the default time limit": "R1536 R1545",
    "simulated clients send and read bytes": "R1210 R1212 R1214",
    "simulated clients send records with the times of a simulated clock": "R1211",
    "all simulated brokers are Oncelog's, and their disks fail as a whole": "R1402 R1403",
    "no two simulated loops have one transactional id": "R1226 R1290 R1346 R1406 R1453",
    "one task of a simulated producer ends its transactions": "R1360",
    "a simulated thread seldom closes a consumer right before another one's callback runs": (
        "R1370 R1385 R1404"
    ),
    "no simulated client or console has a schema registry": (
        "R1380 R1381 R1382 R1383 R1384 R1386 R1387 R1388 R1389 R1400 R1401 R1405"
    ),
    "no simulated batch write has options of streams": "R1582",
    "no simulated task outlives a producer id": "R1702",
    "no simulated function ignores a failed call of `write_atomic`": "R1701 R1814",
    "no simulated executor loses shuffle files": "R1700 R1752 R1813",
    "a simulated producer whose abort of a shared transaction fails is replaced": "R1770 R1771 R1804",
    "a simulated producer that fails is replaced, also after it took an empty transaction over": "R1802",
    "no simulation limits the time of a flush within delivery.timeout.ms": "R1803",
    "no simulated function calls `write_atomic` in two threads": "R1628",
    "no session of Spark Connect is simulated": "R1420 R1421 R1422",
    "no simulated consumer looks up a position behind an error, or polls for no records": "R1362 R1368",
    "no simulated rebalance callback polls, and simulated tasks are not eager": "R1366 R1369",
    "simulated transforms take no time": "R1172 R1173",
    "simulated tasks get their rows without Spark's worker program": "R1160",
    "simulated tasks of a sink seldom race for the plan note": "R1220 R1221 R1292",
    "no simulated driver finishes a batch twice with the same reports": "R1343",
    "no job with provenance is simulated": "R1285 R1286 R1287 R1288 R1289",
    "no audit of tables or keys is simulated": "R1190 R1191 R1192 R1193 R1194 R1195 R1197 R1196 R1198 R1293"
    " R1390 R1391 R1392 R1393 R1396 R1398 R1523 R1585 R1810 R1811 R1812",
    "no simulated group gets its first offsets from two transactions while it fetches them": "R1710",
    "no client forks, and no signal comes between two bytecodes": (
        "L25b R47 R48 R273 R274 R650 R651 R685 R782 R1033 R1121"
    ),
}
"""For each reason, the ids of its findings, separated by spaces."""

SECTIONS: dict[str, str] = {
    "D": "commands, web pages, packages and documents are not simulated",
    "F": "only our clients' requests and random ones are sent",
}
"""For the first letter of finding ids, the reason why no mutant reintroduces these findings."""


def reason_of(finding: str) -> str | None:
    """Return why no mutant reintroduces a finding; None if no reason is given."""
    for reason, findings in OUT_OF_REACH.items():
        if finding in findings.split():
            return reason
    return SECTIONS.get(finding[0])
