#!/bin/sh
echo dolphin >> magnet.md
