#!/bin/sh
echo "sky gravel" > storm.log
